"""Combine adapters into a new one by PEFT's own rules, which want whole factors.

    full factors of the sources --PEFT, on one rank--> full factors of the new one --> pieces

PEFT's ``add_weighted_adapter`` reads factors and scalings alone, never the base. So it runs on a
model of the adapted layers' shapes, whose weights take no memory.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraModel
from torch import nn

from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.linear import TploraLinear
from tplora.errors import ArtifactError, PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from peft import LoraConfig

    from tplora.adapter.factor import Factor
    from tplora.adapter.model import TploraModel

__all__ = ["combined_config", "fill_combined"]

_Layer = TploraLinear | TploraEmbedding
_PLAIN_ONLY = (
    "use_dora",
    "lora_bias",
    "use_bdlora",
    "alora_invocation_tokens",
    "kasa_config",
    "modules_to_save",
    "trainable_token_indices",
)


class _Skeleton:
    """PEFT's tuner over layers of the right shapes, with the sources' factors in it."""

    def __init__(self, model: TploraModel, sources: Sequence[str]) -> None:
        self._layers = {
            name: layer
            for name, layer in _layers(model)
            if any(source in layer.factors for source in sources)
        }
        device = model.get_base_model().device
        root = nn.Module()
        for name, layer in self._layers.items():
            _insert(root, name, _empty_layer(layer, device))
        configs = [(source, self._config(model, source)) for source in sources]
        self.tuner = LoraModel(root, {configs[0][0]: configs[0][1]}, configs[0][0])
        for source, config in configs[1:]:
            self.tuner.peft_config[source] = config
            self.tuner.inject_adapter(root, source)

    def _config(self, model: TploraModel, source: str) -> LoraConfig:
        """The source's ranks and scalings, on exactly its layers; nothing that its init would do.

        Raises:
            PlanError: If it is more than plain LoRA on modules.
        """
        config = copy.copy(model.peft_config[source])
        odd = next((name for name in _PLAIN_ONLY if getattr(config, name)), None)
        odd = odd or (None if config.bias == "none" else "bias")
        if odd is not None or config.target_parameters:
            raise PlanError(
                [
                    f"add_weighted_adapter: adapter {source!r} has "
                    f"{odd or 'target_parameters'}; only plain LoRA on modules can be combined"
                ]
            )
        names = [name for name, layer in self._layers.items() if source in layer.factors]
        config.target_modules = set(names)
        if config.init_lora_weights not in (True, False, "gaussian"):
            config.init_lora_weights = True  # the others look at the base
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        return config

    def whole(self, name: str, what: str, adapter: str) -> torch.Tensor:
        """A or B of one adapter on one layer."""
        layer = self.tuner.model.get_submodule(name)
        if isinstance(self._layers[name], TploraEmbedding):
            tensor: torch.Tensor = getattr(layer, f"lora_embedding_{what}")[adapter].data
        else:
            tensor = getattr(layer, f"lora_{what}")[adapter].weight.data
        return tensor


def combined_config(
    model: TploraModel, adapters: Sequence[str], name: str, settings: Mapping[str, Any]
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """The new adapter's config and its full factors, which only the writer needs to hold.

    Collective: every rank calls it. One all-gather for each cut factor of the sources; every rank
    computes, so that a wrong argument raises on all of them.

    Raises:
        PlanError: If a source cannot be combined, in PEFT's words or ours.
    """
    unknown = [adapter for adapter in adapters if adapter not in model.peft_config]
    if unknown or not adapters or name in model.peft_config:
        found = f"{name!r} is there already" if name in model.peft_config else f"no {unknown}"
        raise PlanError(
            [f"add_weighted_adapter: {found}; the model has {', '.join(model.peft_config)}"]
        )
    skeleton = _Skeleton(model, adapters)
    for layer_name, layer in _layers(model):
        for adapter in adapters:
            for what, factor in layer.factors.get(adapter, {}).items():
                skeleton.whole(layer_name, what, adapter).copy_(factor.full())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(model.seed)  # some ways of combining drop at random
        try:
            skeleton.tuner.add_weighted_adapter(list(adapters), adapter_name=name, **settings)
        except (ValueError, TypeError) as error:
            raise PlanError([f"add_weighted_adapter: {error}"]) from None
    config = skeleton.tuner.peft_config[name]
    return config, {
        f"{layer_name}.{what}": skeleton.whole(layer_name, what, name)
        for layer_name, layer in _layers(model)
        if any(adapter in layer.factors for adapter in adapters)
        for what in ("A", "B")
    }


def fill_combined(model: TploraModel, name: str, whole: Mapping[str, torch.Tensor]) -> None:
    """Cut the full factors into the adapter ``name``, the same bits on every rank.

    Collective: every rank calls it; what the first rank of the group has computed counts.
    """
    with torch.no_grad():
        for layer_name, layer in _layers(model):
            for what, factor in layer.factors.get(name, {}).items():
                full = whole[f"{layer_name}.{what}"].contiguous()
                if tuple(full.shape) != factor.plan.shape:
                    raise ArtifactError(
                        f"{factor.name}: combined to {tuple(full.shape)}, needs "
                        f"{factor.plan.shape}; report this"
                    )
                _copy(factor, full)


def _copy(factor: Factor, full: torch.Tensor) -> None:
    if factor.mesh is not None:
        dist.broadcast(full, group=factor.mesh.get_group(), group_src=0)
    factor.parameter.data.copy_(factor.piece_of(full))


def _layers(model: TploraModel) -> list[tuple[str, _Layer]]:
    """The adapted modules by the base's own names."""
    return [
        (name, module)
        for name, module in model.get_base_model().named_modules()
        if isinstance(module, TploraLinear | TploraEmbedding)
    ]


def _empty_layer(layer: _Layer, device: torch.device) -> nn.Module:
    """A layer of the full shape whose weight is one number, seen many times."""
    rows, columns = layer.plan.weight.shape
    with torch.device("meta"):
        empty: nn.Module = (
            nn.Embedding(rows, columns)
            if isinstance(layer, TploraEmbedding)
            else nn.Linear(columns, rows, bias=False)
        )
    factors = next(iter(layer.factors.values()))
    number = torch.zeros((), dtype=factors["A"].parameter.dtype, device=device)
    empty.weight = nn.Parameter(number.expand(rows, columns), requires_grad=False)
    return empty


def _insert(root: nn.Module, name: str, module: nn.Module) -> None:
    *parents, leaf = name.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.add_module(leaf, module)
