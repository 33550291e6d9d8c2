"""What an adapter may ask of a base whose weights are shared out over data ranks as well.

Such a weight is there, gathered, while its layer runs and at no other time. So what reads or
changes it between forwards cannot be had: inits that start from W, norms of W, merging, training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.errors import PlanError, ShardError
from tplora.upstream.fsdp import is_gathered_alone, is_piece_over_data, is_sharded_over_data

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["check_merge_target", "check_sharded_base"]

_INITS = (True, False, "gaussian", "orthogonal")
_VARIANTS = ("use_dora", "use_bdlora", "kasa_config")
_INSTEAD = "use parallel.dp_replicate_size in place of fsdp_size"


def check_sharded_base(
    model: PreTrainedModel,
    config: LoraConfig,
    layers: Iterable[LayerPlan],
    trained: Iterable[TrainedPlan],
) -> None:
    """Refuse what needs a weight outside a forward; nothing to say of a base that is whole.

    Raises:
        PlanError: Everything that cannot be had, by name.
    """
    if is_sharded_over_data(model):
        problems = list(_find_problems(model, config, layers, trained))
        if problems:
            raise PlanError(problems)


def _find_problems(
    model: PreTrainedModel,
    config: LoraConfig,
    layers: Iterable[LayerPlan],
    trained: Iterable[TrainedPlan],
) -> Iterator[str]:
    start = "is not possible where fsdp_size shards the base: its weights are there in forward only"
    if config.init_lora_weights not in _INITS:
        yield f"lora.init_lora_weights = {config.init_lora_weights!r}: {start}; {_INSTEAD}"
    for name in _VARIANTS:
        if getattr(config, name, None):
            yield f"lora.{name}: {start}; {_INSTEAD}"
    for part in trained:
        yield f"{part.name}: to train it {start}; {_INSTEAD}"
    for layer in layers:
        if layer.kind == "embedding" and is_gathered_alone(model.get_submodule(layer.name)):
            yield f"{layer.name}: an adapter on it {start}; leave it out, or {_INSTEAD}"


def check_merge_target(weight: torch.Tensor) -> None:
    """Refuse to add a delta to a piece of a piece.

    Raises:
        ShardError: If the weight is shared out over data ranks.
    """
    if is_piece_over_data(weight):
        raise ShardError(
            "merge: the base is sharded over data ranks; save the adapter, and merge it into the "
            "base's files with `tplora export`"
        )
