"""What transformers itself gets wrong when it cuts a model, put right while and after it loads.

All of it was read in transformers 5.24, and ``tests/base/test_mends.py`` fails for each entry of
``MENDS`` as soon as transformers is right without it: then the entry goes. One process loads
without any of this; it is the truth that these models are held to.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tplora.base.towers import give_inputs_of_layers
from tplora.collectives.operators import reduce_partial, replicate_input, split_last_dim
from tplora.errors import ShardError
from tplora.upstream import MENDED_STYLES
from tplora.upstream.loading import (
    fused_weights_read_by_piece,
    has_interleaved_experts,
    label_as_halves,
    replace_gaussian_topk,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["CLASS_MENDS", "MENDS", "Mend", "mend_loaded", "mended_while_loading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """One fault of transformers and what is done about it, at tp_size > 1 only."""

    fault: str
    """What goes wrong without the mend."""
    replaces_styles: bool = False
    """Whether transformers is given the styles of ``MENDED_STYLES`` to cut by."""
    fused_sizes: Callable[[int, int], list[int]] | None = None
    """Rows of each weight that a fused one falls into, from its rows and those of the first."""
    check_config: Callable[[Any, int], None] | None = None
    """Called with the text config and tp_size before weights are read."""
    mend_module: Callable[[nn.Module, ProcessGroup], None] | None = None
    """Called with every module of type ``module_type`` of the loaded model."""
    module_type: str = ""
    mend_model: Callable[[PreTrainedModel], None] | None = None
    """Called with the loaded model."""


@contextlib.contextmanager
def mended_while_loading(config: PretrainedConfig, tp_size: int) -> Iterator[dict[str, str]]:
    """While open, a model of this config loads as it should; gives styles for transformers.

    Raises:
        ShardError: If this model cannot be right at this tp_size.
    """
    text = config.get_text_config(decoder=True)
    mend = _mend_of(config)
    if mend is None:
        yield {}
        return
    if mend.check_config is not None:
        mend.check_config(text, tp_size)
    if mend.replaces_styles and config.model_type not in MENDED_STYLES:
        raise ShardError(
            f"parallel.tp_size = {tp_size}: {config.model_type} is not right when cut; use "
            f"parallel.tp_size = 1, or a model of {text.model_type} alone"
        )
    styles = MENDED_STYLES[config.model_type] if mend.replaces_styles else {}
    with contextlib.ExitStack() as stack:
        if mend.fused_sizes is not None:
            stack.enter_context(fused_weights_read_by_piece(mend.fused_sizes))
        yield dict(styles)


def check_can_shard(config: PretrainedConfig, tp_size: int, *, is_quantized: bool) -> None:
    """Refuse what has to be done to weights of which data ranks hold pieces only.

    Raises:
        ShardError: If the model has a mend that its being cut makes necessary, or is quantised.
    """
    if is_quantized or (tp_size > 1 and _mend_of(config) is not None):
        what = "is quantised" if is_quantized else "is mended after it is cut"
        raise ShardError(
            f"parallel.fsdp_size: {config.model_type} {what}, which a base that is sharded over "
            "data ranks cannot be; use parallel.dp_replicate_size in its place"
        )


def _mend_of(config: PretrainedConfig) -> Mend | None:
    """The mend of the class with towers, if it has one of its own, or else of its text model."""
    text_type = config.get_text_config(decoder=True).model_type
    return CLASS_MENDS.get(config.model_type) or MENDS.get(text_type)


def mend_loaded(model: PreTrainedModel, group: ProcessGroup) -> None:
    """Put right what is wrong in a model that was loaded over the ranks of ``group``.

    Raises:
        ShardError: If the checkpoint has a form for which this is not known to be right.
    """
    mend = _mend_of(model.config)
    if mend is None:
        return
    if mend.mend_model is not None:
        mend.mend_model(model)
    if mend.mend_module is not None:
        for module in model.modules():
            if type(module).__name__ == mend.module_type:
                mend.mend_module(module, group)


# doge


def _cut_mask_by_heads(attention: Any, group: ProcessGroup) -> None:
    """Of the dynamic mask, computed for all heads, each rank uses those of its own queries."""
    for_all = attention.prepare_dynamic_mask

    def for_own(hidden_states: Any, dt_states: torch.Tensor, *args: Any, **settings: Any) -> Any:
        own = split_last_dim(dt_states.transpose(-1, -2), group).transpose(-1, -2)
        return for_all(hidden_states, own, *args, **settings)

    attention.prepare_dynamic_mask = for_own


# gemma3n


def _share_statistics(mlp: Any, group: ProcessGroup) -> None:
    if mlp.activation_sparsity > 0.0:
        replace_gaussian_topk(mlp, partial(_gaussian_topk, mlp, group))


def _gaussian_topk(mlp: Any, group: ProcessGroup, inputs: torch.Tensor) -> torch.Tensor:
    """What ``Gemma3nTextMLP`` does, with mean and deviation over the features of all ranks.

    Like torch's own, the statistics are taken in float32 at least and rounded once.
    """
    wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
    mean = _mean_over_ranks(wide, mlp.intermediate_size, group)
    variance = _mean_over_ranks((wide - mean).square(), mlp.intermediate_size, group)
    is_flat = variance == 0  # where the gradient of a root is infinite, torch.std has none
    deviation = variance.masked_fill(is_flat, 1.0).sqrt().masked_fill(is_flat, 0.0)
    sparsity = torch.tensor(mlp.activation_sparsity, dtype=torch.float32, device=inputs.device)
    normal: Any = torch.distributions.Normal(0, 1)
    multiplier = normal.icdf(sparsity).type(inputs.dtype)
    cutoff = mean.type(inputs.dtype) + deviation.type(inputs.dtype) * multiplier
    return nn.functional.relu(inputs - cutoff)


def _mean_over_ranks(x: torch.Tensor, size: int, group: ProcessGroup) -> torch.Tensor:
    """The mean of a cut last dim: of cut features, and read by cut features again (g, then f)."""
    return replicate_input(reduce_partial(x.sum(-1, keepdim=True), group), group) / size


# hrm_text, sarvam_moe


def _equal_parts(fused: int, first: int) -> list[int]:
    return [first] * (fused // first)


def _queries_keys_values(fused: int, queries: int) -> list[int]:
    return [queries, (fused - queries) // 2, (fused - queries) // 2]


# inkling


def _share_gammas(shared_experts: nn.Module, group: ProcessGroup) -> None:
    """Cut experts read the router's weights; transformers sums the gradient of positional ones."""

    def sum_gradient(module: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        return args, given | {"gammas": replicate_input(given["gammas"], group)}

    shared_experts.register_forward_pre_hook(sum_gradient, with_kwargs=True)


def _refuse_interleaved_experts(model: PreTrainedModel) -> None:
    if has_interleaved_experts(model):
        raise ShardError(
            f"{model.config.model_type}: the checkpoint's experts have alternating gate and up "
            "rows, and cut so they are wrong; load the model in one process, save it with "
            "save_pretrained(..., save_original_format=False) and load that"
        )


# inkling2


def _refuse_odd_experts(config: Any, tp_size: int) -> None:
    """A gate row and its up row stand together in the checkpoint; a cut must not part them."""
    rows = 2 * config.moe_intermediate_size
    if -(-rows // tp_size) % 2:
        raise ShardError(
            f"parallel.tp_size = {tp_size}: {config.model_type}'s experts have {rows} rows, gate "
            f"and up in turn, and pieces of {-(-rows // tp_size)} would part them; use a tp_size "
            f"that divides {config.moe_intermediate_size}"
        )


def _label_experts(model: PreTrainedModel) -> None:
    if not has_interleaved_experts(model):
        raise ShardError(
            f"{model.config.model_type}: the checkpoint's experts are not in the published form "
            "(mlp.experts.w13_weight), and cut otherwise they are wrong; save the model with "
            "save_pretrained and load that"
        )
    for module in list(model.modules()):
        if "gate_up_proj" in dict(module.named_parameters(recurse=False)):
            label_as_halves(module, "gate_up_proj", 1)


# llama4


def _give_a_fresh_tensor(moe: Any, group: ProcessGroup) -> None:
    """The experts' output is added in place to the shared expert's, which DTensor has a view of."""
    moe.shared_expert.register_forward_hook(lambda module, args, output: output.clone())


_INKLING2 = Mend(
    fault="full_tensor() of experts' gate_up_proj mixes gate and up rows",
    check_config=_refuse_odd_experts,
    mend_model=_label_experts,
)

MENDS = {
    "doge": Mend(
        fault="its attention mask has all heads where queries have this rank's",
        module_type="DogeAttention",
        mend_module=_cut_mask_by_heads,
    ),
    "gemma3n_text": Mend(
        fault="it takes mean and deviation over this rank's features only",
        module_type="Gemma3nTextMLP",
        mend_module=_share_statistics,
    ),
    "hrm_text": Mend(
        fault="a fused weight is cut before it falls apart, so 24 of 35 weights are others",
        fused_sizes=_equal_parts,
    ),
    "inkling_text": Mend(
        fault="its embedding has a norm inside its forward, its experts' gate and up are parted, "
        "and its shared experts mix whole and cut tensors",
        replaces_styles=True,
        module_type="InklingSharedExperts",
        mend_module=_share_gammas,
        mend_model=_refuse_interleaved_experts,
    ),
    "inkling2_loop_text": _INKLING2,
    "inkling2_text": _INKLING2,
    "llama4_text": Mend(
        fault="it writes in place to a view of a distributed tensor",
        module_type="Llama4TextMoe",
        mend_module=_give_a_fresh_tensor,
    ),
    "sarvam_moe": Mend(
        fault="a fused weight is split by full sizes after it was cut, which fails",
        fused_sizes=_queries_keys_values,
    ),
}
"""By the model type of the text config."""

CLASS_MENDS = {
    "gemma4": Mend(
        fault="it mixes a row of the cut embedding with a plain tensor",
        module_type="Gemma4Model",
        mend_module=give_inputs_of_layers,
    ),
    "qwen3_vl": Mend(
        fault="only embedding and head have styles, so that every rank would hold all layers",
        replaces_styles=True,
    ),
}
"""By the model type of a class with towers, for what is wrong in the class, not its text model."""
