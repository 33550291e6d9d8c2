"""Which parameter each part of an adapter changes, and how, as PEFT itself has read it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from peft.tuners.lora import Embedding, Linear, ParamWrapper
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from tplora.artifact.change import (
    AddedVector,
    ByPeft,
    Change,
    Dora,
    LowRank,
    Replaced,
    ReplacedRows,
)
from tplora.errors import ArtifactError
from tplora.upstream.peft_reading import (
    base_parameter_name,
    is_lora_layer,
    lora_variant_name,
    stack_is_transposed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch

__all__ = ["ParameterChange", "changes_of"]

# Variants whose merge PEFT has, beside plain LoRA (peft 0.21, lora/variants.py).
_MERGED_BY_PEFT = (
    "DoraLinearVariant", "DoraEmbeddingVariant", "DoraConv1dVariant", "DoraConv2dVariant",
    "DoraConv3dVariant", "BdLoraLinearVariant", "KasaLinearVariant", "MiCALinearVariant",
    "MiCAEmbeddingVariant",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ParameterChange:
    """Everything that changes one parameter, in PEFT's order."""

    reads: list[Callable[[torch.dtype, bool], Change]] = field(default_factory=list)
    """Each makes a change in the dtype that is summed in, with one product or by rows."""
    replaced_by: list[str] = field(default_factory=list)
    """Adapters that put another tensor, or other rows, in its place."""
    tokens: set[int] = field(default_factory=set)
    """Rows that were trained by themselves."""
    num_rows: int = 0
    """That it has to have at least: more than the base's where tokens were added."""

    def read(self, dtype: torch.dtype, *, in_one_product: bool) -> list[Change]:
        """The changes, in the dtype that is summed in."""
        return [read(dtype, in_one_product) for read in self.reads]


def changes_of(
    peft_model: Any, weights: Mapping[str, float], *, filled: Collection[str] = ()
) -> dict[str, ParameterChange]:
    """Parameter of the base to what the adapters make of it.

    Args:
        peft_model: On the meta device, with the factors of the adapters in memory.
        weights: Adapter to what its delta is multiplied by.
        filled: Parameters of the base that held numbers before an adapter was read.

    Raises:
        ArtifactError: If two adapters replace one tensor, PEFT has no merge for a variant, or a
            tensor that is put in another's place is to be weighed.
    """
    found: dict[str, ParameterChange] = {}
    for name, read in _saved_in_base(peft_model):
        if base_parameter_name(name) not in filled:
            _replace(found, base_parameter_name(name), read, next(iter(weights)), weights)
    for name, module in peft_model.named_modules():
        for adapter in weights:
            _take_replaced(found, name, module, adapter, weights)
        if is_lora_layer(module):
            _take_layer(found, name, module, weights)
    return found


def _saved_in_base(peft_model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a file holds of the base itself, such as trained biases: it is not empty any more."""
    for name, parameter in peft_model.named_parameters():
        is_own = any(part in name for part in (".lora_", ".modules_to_save.", "trainable_tokens"))
        is_saved_copy = name.endswith(".base_layer.weight") or ".original_module." in name
        if not (is_own or is_saved_copy or parameter.is_meta):
            yield name, parameter.data


def _take_replaced(
    found: dict[str, ParameterChange],
    name: str,
    module: Any,
    adapter: str,
    weights: Mapping[str, float],
) -> None:
    if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
        for leaf, tensor in module.modules_to_save[adapter].named_parameters():
            _replace(found, base_parameter_name(f"{name}.{leaf}"), tensor.data, adapter, weights)
    if isinstance(module, TrainableTokensWrapper) and not module.token_adapter.tied_adapter:
        layer = module.token_adapter
        if adapter not in layer.trainable_tokens_delta:
            return
        indices = list(layer.token_indices[adapter])
        change = found.setdefault(base_parameter_name(f"{name}.weight"), ParameterChange())
        if change.tokens & set(indices):
            raise ArtifactError(
                f"adapter {adapter!r} and another one both hold rows of the same tokens of "
                f"{base_parameter_name(name)}; merge one of them"
            )
        _check_weight(adapter, weights, f"rows of tokens of {base_parameter_name(name)}")
        change.tokens |= set(indices)
        change.num_rows = max(change.num_rows, *(index + 1 for index in indices))
        trained = layer.trainable_tokens_delta[adapter].data
        change.reads.append(
            lambda dtype, _, indices=indices, trained=trained: ReplacedRows(  # type: ignore[misc]
                indices, trained.to(dtype)
            )
        )


def _replace(
    found: dict[str, ParameterChange],
    name: str,
    tensor: torch.Tensor,
    adapter: str,
    weights: Mapping[str, float],
) -> None:
    change = found.setdefault(name, ParameterChange())
    if change.replaced_by:
        raise ArtifactError(
            f"adapters {change.replaced_by[0]!r} and {adapter!r} both hold {name} as a whole; "
            "merge one of them"
        )
    _check_weight(adapter, weights, f"{name} as a whole")
    change.replaced_by.append(adapter)
    change.num_rows = tensor.shape[0] if tensor.ndim else 0
    change.reads.insert(0, lambda dtype, _: Replaced(tensor.to(dtype)))


def _check_weight(adapter: str, weights: Mapping[str, float], what: str) -> None:
    if weights[adapter] != 1:
        raise ArtifactError(
            f"adapter {adapter!r} holds {what}, which a weight of {weights[adapter]:g} cannot be "
            "applied to; give it the weight 1"
        )


def _take_layer(
    found: dict[str, ParameterChange], name: str, layer: Any, weights: Mapping[str, float]
) -> None:
    held = [one for one in weights if one in layer.lora_A or one in layer.lora_embedding_A]
    if not held:
        return
    for adapter in held:
        layer.scaling[adapter] *= weights[adapter]
        _check_variant(name, lora_variant_name(layer, adapter))
    parameter = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    change = found.setdefault(base_parameter_name(f"{name}.{parameter}"), ParameterChange())
    change.reads += _reads(layer, held)
    biased = [one for one in held if layer.lora_bias.get(one)]
    if biased:
        bias = found.setdefault(base_parameter_name(f"{name}.bias"), ParameterChange())
        bias.reads += [partial(_added_bias, layer, adapter) for adapter in biased]


def _check_variant(name: str, variant: str | None) -> None:
    if variant is not None and variant not in _MERGED_BY_PEFT:
        raise ArtifactError(
            f"{base_parameter_name(name)}: is adapted by {variant}, which PEFT does not merge; use "
            "the adapter unmerged"
        )


def _reads(layer: Any, held: Sequence[str]) -> list[Callable[[torch.dtype, bool], Change]]:
    variants = {lora_variant_name(layer, adapter) for adapter in held}
    if variants == {None} and _is_matrix(layer):
        return [partial(_low_rank, layer, adapter) for adapter in held]
    if variants == {"DoraLinearVariant"} and len(held) == 1 and type(layer) is Linear:
        return [partial(_dora, layer, held[0])]
    return [lambda dtype, _: ByPeft(layer, held)]


def _is_matrix(layer: Any) -> bool:
    if isinstance(layer, ParamWrapper):
        return bool(layer.num_experts > 1 or layer.get_param().ndim == 2)
    return type(layer) is Embedding or (type(layer) is Linear and not layer.fan_in_fan_out)


def _low_rank(layer: Any, adapter: str, dtype: torch.dtype, in_one_product: bool) -> LowRank:
    is_embedding = isinstance(layer, Embedding)
    is_stack = isinstance(layer, ParamWrapper) and layer.num_experts > 1
    if is_embedding:
        a, b = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
    else:
        a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return LowRank(
        a.data.to(dtype),
        b.data.to(dtype),
        layer.scaling[adapter],
        num_experts=layer.num_experts if is_stack else 0,
        is_transposed=is_embedding or (is_stack and stack_is_transposed(layer)),
        in_one_product=in_one_product,
    )


def _dora(layer: Any, adapter: str, dtype: torch.dtype, in_one_product: bool) -> Dora:
    magnitude = layer.lora_magnitude_vector[adapter].weight
    return Dora(_low_rank(layer, adapter, dtype, in_one_product), magnitude.data.to(dtype))


def _added_bias(layer: Any, adapter: str, dtype: torch.dtype, _: bool) -> AddedVector:
    return AddedVector(layer.lora_B[adapter].bias.data.to(dtype), layer.scaling[adapter])
