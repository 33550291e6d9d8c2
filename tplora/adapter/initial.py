"""Initial factors that PEFT computes from all of W, on a layer that holds a piece of it.

    W             all-gather of the pieces, one layer at a time
    A0, B0, W'    PEFT's own init on W; the first rank's numbers on every rank
    W'            cut as W was, into the storage of the pieces

So every number is that of one process. Where the init takes ``scaling * B0 A0`` out of W, A0 and B0
are kept: a saved adapter is for the W that was loaded (``original.py``).

Shapes: W and W' ``[O, I]`` in full while one layer is made, A0 ``[R, I]`` and B0 ``[O, R]`` in full
on the CPU of the group's first rank, the probe ``[O]`` on every rank.

Communication, once per layer: one all-gather of W, one broadcast of A0, of B0 and of W'.

Source: PEFT 0.21's ``pissa_init``, ``olora_init``, ``corda_init``, ``lora_ga_init``, ``mica_init``;
Meng et al. 2024 (PiSSA), Büyükakyüz 2024 (OLoRA), Yang et al. 2024 (CorDA), Wang et al. 2024
(LoRA-GA).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from tplora.errors import PlanError
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peft import LoraConfig
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.adapter.factor import Factors
    from tplora.plan.layer import LayerPlan

__all__ = ["FromWholeWeight", "Initial", "check_preprocessed", "gather_weight", "whole_weight"]

_LEFT_ON_BASE = {
    "corda": (
        "eigens",
        "call peft's preprocess_corda(model, config) before attaching, with a corda_config whose "
        "cache_file was written in one process: the covariance is of inputs that are cut here",
    ),
    "lora_ga": (
        "_peft_loraga_grad",
        "call peft's preprocess_loraga(model, config, train_step) before attaching, with modules "
        'by name: it does not know "all-linear"',
    ),
}


@dataclass(frozen=True, slots=True)
class Initial:
    """What an init took out of one W."""

    a: torch.Tensor | None
    """A0 in full; None on all ranks of the group but the first."""
    b: torch.Tensor | None
    probe: torch.Tensor
    """``B0 A0 u`` for a fixed u: the same where B0 A0 is, whatever the signs of its vectors."""


def check_preprocessed(model: nn.Module, config: LoraConfig, layers: Iterable[LayerPlan]) -> None:
    """Refuse an init without what PEFT's preprocessing leaves on the base; LoRA-GA would draw.

    Raises:
        PlanError: Naming the first layer that lacks it.
    """
    attribute, what_to_do = _LEFT_ON_BASE.get(str(config.init_lora_weights), ("", ""))
    for layer in layers:
        is_linear = attribute and layer.kind == "linear"
        if is_linear and not hasattr(model.get_submodule(layer.name), attribute):
            raise PlanError(
                [
                    f"lora.init_lora_weights = {config.init_lora_weights!r}: {layer.name} has no "
                    f"{attribute}; {what_to_do}"
                ]
            )


class FromWholeWeight:
    """Put before PEFT's layer: its inits see W in full, and leave this rank's piece of W'."""

    mesh: DeviceMesh | None
    factors: dict[str, Factors]

    @property
    def initial(self) -> dict[str, Initial]:
        """By adapter, what was taken out of W; empty for an init that leaves W as it is."""
        found: dict[str, Initial] = vars(self).setdefault("_initial", {})
        return found

    def pissa_init(self, adapter_name: str, init_lora_weights: str) -> None:
        """The largest singular vectors of W."""
        with self._taking_from_weight(adapter_name):
            super().pissa_init(adapter_name, init_lora_weights)  # type: ignore[misc]

    def olora_init(self, adapter_name: str) -> None:
        """The first columns of Q and rows of R, where W = Q R."""
        with self._taking_from_weight(adapter_name):
            super().olora_init(adapter_name)  # type: ignore[misc]

    def corda_init(self, adapter_name: str, init_lora_weights: str) -> None:
        """Singular vectors of W times the inputs' covariance, which PEFT has left on the base."""
        with self._taking_from_weight(adapter_name):
            super().corda_init(adapter_name, init_lora_weights)  # type: ignore[misc]

    def lora_ga_init(self, adapter_name: str, lora_ga_config: Any) -> None:
        """Singular vectors of W's gradient, which PEFT has left on the base."""
        base: Any = self.get_base_layer()  # type: ignore[attr-defined]
        if isinstance(base._peft_loraga_grad, DTensor):
            base._peft_loraga_grad = base._peft_loraga_grad.full_tensor()
        with self._taking_from_weight(adapter_name):
            super().lora_ga_init(adapter_name, lora_ga_config)  # type: ignore[misc]

    def mica_init(self, adapter_name: str) -> None:
        """The smallest left singular vectors of W, which keep their values; W stays as it is."""
        with whole_weight(self, changes_weight=False):
            super().mica_init(adapter_name)  # type: ignore[misc]
            _take_the_firsts(self.mesh, _drawn(self, adapter_name))

    @contextlib.contextmanager
    def _taking_from_weight(self, adapter_name: str) -> Iterator[None]:
        with whole_weight(self):
            yield
            a, b = _drawn(self, adapter_name)
            _take_the_firsts(self.mesh, (a, b))
        is_keeper = self.mesh is None or self.mesh.get_local_rank() == 0
        u = torch.arange(1.0, a.shape[1] + 1, device=a.device).cos().to(a.dtype)
        self.initial[adapter_name] = Initial(
            a.to("cpu", torch.float32, copy=True) if is_keeper else None,
            b.to("cpu", torch.float32, copy=True) if is_keeper else None,
            (b @ (a @ u)).to("cpu", torch.float32),
        )


@contextlib.contextmanager
def whole_weight(layer: Any, *, changes_weight: bool = True) -> Iterator[None]:
    """While open, the base of ``layer`` holds W in full; then this rank's piece of what it became.

    The piece is written into the storage it had, so a weight that shares it follows, as the one
    parameter of tied layers does in one process. Collective: every rank of the group opens it.

    Args:
        layer: A layer with ``mesh`` and ``get_base_layer``; without a mesh nothing is done.
        changes_weight: False leaves W as it was.
    """
    base = layer.get_base_layer()
    if layer.mesh is None:
        yield
        return
    placed = base._parameters["weight"]
    base._parameters["weight"] = nn.Parameter(gather_weight(placed), requires_grad=False)
    try:
        yield
        if changes_weight:
            whole = base.weight.data.contiguous()
            _take_the_firsts(layer.mesh, (whole,))
            with torch.no_grad():
                local_shard(placed).copy_(_piece_like(placed, whole))
    finally:
        base._parameters["weight"] = placed


def gather_weight(placed: torch.Tensor) -> torch.Tensor:
    """W in full, no view of this rank's piece. Collective where it is cut."""
    whole = placed.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    is_own = whole.data_ptr() != local_shard(placed).data_ptr()
    return whole if is_own else whole.clone()


def _piece_like(placed: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's piece of ``whole``, cut as ``placed`` is. No communication."""
    if not isinstance(placed, DTensor):
        return whole
    everywhere = DTensor.from_local(
        whole, placed.device_mesh, [Replicate()] * placed.device_mesh.ndim, run_check=False
    )
    return local_shard(everywhere.redistribute(placements=placed.placements))


def _drawn(layer: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as PEFT has just made them, in full."""
    if name in layer.lora_embedding_A:
        return layer.lora_embedding_A[name].data, layer.lora_embedding_B[name].data
    return layer.lora_A[name].weight.data, layer.lora_B[name].weight.data


def _take_the_firsts(mesh: DeviceMesh | None, tensors: tuple[torch.Tensor, ...]) -> None:
    """The numbers of the group's first rank on every rank: a decomposition is not one bit's."""
    if mesh is None:
        return
    for tensor in tensors:
        sent = tensor.contiguous()
        dist.broadcast(sent, group=mesh.get_group(), group_src=0)
        if sent is not tensor:
            tensor.copy_(sent)
