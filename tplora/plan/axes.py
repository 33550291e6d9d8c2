"""The axes of a run: how many processes share a layer, and over how many the rows are spread.

    world = dp_replicate_size * fsdp_size * tp_size,   tp innermost

Rank r has place ``r % tp_size`` in its tensor-parallel group and place ``r // tp_size`` on the data
axes; torchrun numbers the processes of a node one after another, so a tp group that divides a node
stays inside it. Names are those of ``DistributedConfig``. Plain numbers, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.errors import LaunchError

if TYPE_CHECKING:
    from tplora.recipe.schema import ParallelTable

__all__ = ["Axes", "fill_world"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The size of every axis."""

    tp_size: int
    """Ranks that share each layer and get the same rows."""
    fsdp_size: int = 1
    """Data ranks that share the frozen base's pieces and gather them layer by layer."""
    dp_replicate_size: int = 1
    """Data ranks that hold copies."""

    @property
    def data_size(self) -> int:
        """Ranks along the data axes: each gets other rows."""
        return self.fsdp_size * self.dp_replicate_size

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.tp_size * self.data_size

    def __str__(self) -> str:
        """The product as a person writes it, without axes of one rank; tp_size always."""
        sizes = {
            "dp_replicate_size": self.dp_replicate_size,
            "fsdp_size": self.fsdp_size,
            "tp_size": self.tp_size,
        }
        shown = [f"{name} {n}" for name, n in sizes.items() if n > 1 or name == "tp_size"]
        return " x ".join(shown)

    def check_world(self, world_size: int) -> None:
        """Refuse a world that is not the product.

        Raises:
            LaunchError: With every size and what to start instead.
        """
        if world_size != self.world_size:
            raise LaunchError(
                f"parallel: {self} needs {self.world_size} processes, {world_size} were started; "
                f"use --nproc-per-node {self.world_size}, or sizes whose product is {world_size}"
            )

    def check_node(self, local_world_size: int) -> None:
        """Refuse nodes that a tp group does not fit into: its collectives are in every layer.

        Args:
            local_world_size: Processes of each node.

        Raises:
            LaunchError: With the sizes that fit.
        """
        if local_world_size % self.tp_size:
            fitting = [str(n) for n in range(1, local_world_size + 1) if not local_world_size % n]
            raise LaunchError(
                f"parallel.tp_size = {self.tp_size}: a node has {local_world_size} processes, and "
                f"the ranks of a tp group have to share one; use tp_size {', '.join(fitting)}, and "
                "fsdp_size or dp_replicate_size for the rest"
            )


def fill_world(world_size: int, parallel: ParallelTable) -> Axes:
    """The axes of a world of that size; tp_size "auto" is what the data axes leave.

    Raises:
        LaunchError: If the sizes' product is not the world's.
    """
    data_size = parallel.fsdp_size * parallel.dp_replicate_size
    tp_size = parallel.tp_size
    if tp_size == "auto":
        if world_size % data_size:
            raise LaunchError(
                f'parallel.tp_size = "auto": {world_size} processes cannot be shared out to '
                f"{data_size} groups (fsdp_size {parallel.fsdp_size} x dp_replicate_size "
                f"{parallel.dp_replicate_size}); start a multiple of {data_size}"
            )
        tp_size = world_size // data_size
    axes = Axes(
        tp_size=tp_size,
        fsdp_size=parallel.fsdp_size,
        dp_replicate_size=parallel.dp_replicate_size,
    )
    axes.check_world(world_size)
    return axes
