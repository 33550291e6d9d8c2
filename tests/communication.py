"""What ranks say to each other, by kind and in bytes.

torch's own CommDebugMode counts calls too, and a test holds this counter to it. But it puts
backward hooks on every module, which hand each layer a tensor of its own: layers that read one
tensor would no longer be seen to share a reduction.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


class Recorded(TorchDispatchMode):
    """While open, keeps the kind and the bytes of each collective that this rank starts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        """Kind, and bytes that this rank gives, in order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        is_local = "wait_tensor" in str(func) or "wrap_tensor" in str(func)
        if "c10d" in func.namespace and not is_local:
            given = args[1] if "allgather_" in str(func) else args[0]  # (outputs, inputs, ...)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.calls.append((kind_of(str(func)), sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))

    def of(self, kind: str) -> list[int]:
        """The bytes of each call of ``kind``, in order."""
        return [num_bytes for found, num_bytes in self.calls if found == kind]


def count_collectives(fn: Callable[[], object]) -> dict[str, int]:
    """Calls of each kind while ``fn`` ran."""
    with Recorded() as recorded:
        fn()
    return dict(Counter(kind for kind, _ in recorded.calls))


def kind_of(op: str) -> str:
    """The kind of collective that an operator of torch is."""
    name = op.split(".")[1].strip("_").replace("_into_tensor", "").replace("coalesced", "")
    return _KINDS.get(name.replace("_", ""), name)
