"""The nodes of a run, and how many processes each of them starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.errors import LaunchError
from tplora.plan.axes import Axes, fill_world

if TYPE_CHECKING:
    from tplora.recipe.schema import ParallelTable

__all__ = ["Nodes", "processes_of_node"]

_DEFAULT_PORT = 29400  # torchrun's
_LOOPBACK = ("localhost", "127.", "::1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """As torchrun names them. One node alone when left out."""

    num_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None
    """HOST or HOST:PORT of node 0, as all nodes reach it."""
    processes_per_node: int | None = None
    """None is what the axes ask for."""
    agreed: str = ""
    """What else has to be the same on every node, in words."""

    def check(self) -> None:
        """Refuse what does not go together.

        Raises:
            LaunchError: Naming the option.
        """
        if self.node_rank >= self.num_nodes:
            raise LaunchError(
                f"--node-rank {self.node_rank}: there are {self.num_nodes} nodes, counted from 0; "
                "give every node its own number below that"
            )
        if self.num_nodes > 1 and not self.endpoint:
            raise LaunchError(
                f"--nnodes {self.num_nodes}: needs --rdzv-endpoint HOST:PORT, an address of node 0 "
                "and a free port there, the same on every node"
            )
        if self.num_nodes == 1 and self.endpoint:
            raise LaunchError(
                f"--rdzv-endpoint {self.endpoint}: one node alone meets nobody; set --nnodes, or "
                "leave it out"
            )
        if self.endpoint and self.port is None:
            raise LaunchError(
                f"--rdzv-endpoint {self.endpoint}: needs HOST:PORT, such as node-0:{_DEFAULT_PORT}"
            )

    @property
    def host(self) -> str:
        """Of the endpoint."""
        host, _, port = (self.endpoint or "localhost").rpartition(":")
        return host or port

    @property
    def port(self) -> int | None:
        """Of the endpoint; None if it is no port."""
        host, _, port = (self.endpoint or "localhost").rpartition(":")
        if not host:
            return _DEFAULT_PORT
        return int(port) if port.isdigit() and 0 < int(port) < 65536 else None

    @property
    def is_on_loopback(self) -> bool:
        """Whether every node is this machine."""
        return self.num_nodes == 1 or self.host.startswith(_LOOPBACK)


def processes_of_node(parallel: ParallelTable, nodes: Nodes, *, num_gpus: int) -> tuple[int, Axes]:
    """How many processes this node starts, and the axes of all nodes' processes.

    The axes' product is shared out evenly; tp_size "auto" takes every GPU.

    Raises:
        LaunchError: If it cannot be, if this node has too few GPUs, or if a tp group would not fit
            into a node.
    """
    data_size = parallel.fsdp_size * parallel.dp_replicate_size
    per_node = nodes.processes_per_node
    if per_node is None and parallel.tp_size == "auto":
        per_node = num_gpus or -(-data_size // nodes.num_nodes)
    if per_node is None:
        per_node = _share_out(int(parallel.tp_size) * data_size, nodes)
    if 0 < num_gpus < per_node:
        raise LaunchError(_too_few_gpus(per_node, num_gpus, nodes, data_size))
    axes = fill_world(per_node * nodes.num_nodes, parallel)
    axes.check_node(per_node)
    return per_node, axes


def _share_out(wanted: int, nodes: Nodes) -> int:
    if wanted % nodes.num_nodes:
        raise LaunchError(
            f"parallel: its sizes' product is {wanted} processes, which {nodes.num_nodes} nodes "
            f"cannot share evenly; use sizes whose product {nodes.num_nodes} divides"
        )
    return wanted // nodes.num_nodes


def _too_few_gpus(wanted: int, num_gpus: int, nodes: Nodes, data_size: int) -> str:
    sizes = "parallel.tp_size" if data_size == 1 else "parallel: the product of its sizes"
    if nodes.num_nodes > 1:
        sizes = "parallel: processes on each node"
    return (
        f"{sizes} = {wanted}: this machine has {num_gpus} GPU{'s'[: num_gpus > 1]}; "
        f"set it to {num_gpus} or less, or run on the CPU with CUDA_VISIBLE_DEVICES="
    )
