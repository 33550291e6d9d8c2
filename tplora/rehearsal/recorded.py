"""What a rank says to the others, by kind and in bytes, in order.

torch's own CommDebugMode counts calls too, and a test holds this recorder to it. But it puts
backward hooks on every module, which hand each layer a tensor of its own: layers that read one
tensor would no longer be seen to share a reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Recorded", "kind_of"]

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, keeps the kind and the bytes of each collective that this rank starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []
        """Kind, and bytes that this rank gives, in order."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the operator if it is a collective, and run it."""
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        name = str(func)
        is_local = "wait_tensor" in name or "wrap_tensor" in name
        if "c10d" in func.namespace and not is_local:  # type: ignore[attr-defined]
            # (outputs, inputs, ...), which functional collectives have not
            has_outputs = "allgather_" in name or name.startswith("c10d.reduce_scatter_")
            given = args[int(has_outputs)]
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.calls.append((kind_of(name), sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))

    def of(self, kind: str) -> list[int]:
        """The bytes of each call of ``kind``, in order."""
        return [num_bytes for found, num_bytes in self.calls if found == kind]


def kind_of(op: str) -> str:
    """The kind of collective that an operator of torch is."""
    name = op.split(".")[1].strip("_").replace("_into_tensor", "").replace("coalesced", "")
    return _KINDS.get(name.replace("_", ""), name)
