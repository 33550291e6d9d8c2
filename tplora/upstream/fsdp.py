"""Private names around FSDP2: what it manages of a model, and how a PEFT model reaches it.

torch's ``fully_shard`` (2.11 to 2.14), as transformers 5.24 applies it while it loads
(distributed/fsdp.py): to each decoder layer, the embedding, and norm and head together. Hooks on
these put a gathered weight in the place of the piece for the length of a forward or backward; under
TP it is a DTensor on the tp mesh alone, so ``local_shard`` is then what TP alone would hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

if TYPE_CHECKING:
    import torch
    from peft.tuners.tuners_utils import BaseTuner
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "enter_through_hooks",
    "gathered_over_data",
    "is_gathered_alone",
    "is_piece_over_data",
    "is_sharded_over_data",
    "tp_placement",
]


def is_sharded_over_data(model: nn.Module) -> bool:
    """Whether the model's weights are gathered, layer by layer, as it runs."""
    return isinstance(model, FSDPModule)


def is_gathered_alone(module: nn.Module) -> bool:
    """Whether a module's weights are gathered when it is called itself, and not before."""
    return isinstance(module, FSDPModule)


def _axis_names(weight: torch.Tensor) -> tuple[str, ...]:
    """The mesh axes of a weight; FSDP's are ``dp_replicate`` and ``fsdp``."""
    if not isinstance(weight, DTensor):
        return ()
    return tuple(weight.device_mesh.mesh_dim_names or ())


def is_piece_over_data(weight: torch.Tensor) -> bool:
    """Whether this rank holds of a weight what falls to it of the data ranks."""
    return "fsdp" in _axis_names(weight)


def tp_placement(weight: DTensor) -> Placement:
    """How a weight is cut over the tp axis, whatever data axes do to it."""
    if is_piece_over_data(weight) and "tp" not in _axis_names(weight):
        return Replicate()
    return weight.placements[-1]


def gathered_over_data(weight: torch.Tensor) -> torch.Tensor:
    """A weight that is whole, or cut over the tp axis alone. Collective: one all-gather."""
    if not isinstance(weight, DTensor) or not is_piece_over_data(weight):
        return weight
    places = [Replicate() if name != "tp" else tp_placement(weight) for name in _axis_names(weight)]
    return weight.redistribute(placements=places)


def enter_through_hooks(tuner: BaseTuner, base: nn.Module) -> None:
    """Have PEFT call the base, of which it calls ``forward`` alone.

    ``BaseTuner.forward`` (peft 0.21) is ``self.model.forward(...)``, past the hook with which FSDP
    begins a forward of the whole model.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        return base(*args, **kwargs)

    tuner.forward = forward
