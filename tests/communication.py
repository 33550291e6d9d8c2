"""What ranks say to each other: calls by kind through torch's own counter, and bytes."""

from collections import Counter
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}


def count_collectives(fn: Callable[[], object]) -> dict[str, int]:
    """Calls of each kind while ``fn`` ran, as torch's CommDebugMode counts them."""
    with CommDebugMode() as mode:
        fn()
    counts: Counter[str] = Counter()
    for op, number in mode.get_comm_counts().items():
        counts[_kind(str(op))] += number
    return dict(counts)


class RecordedBytes(TorchDispatchMode):
    """While open, adds up the bytes that this rank gives to each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            given = args[1] if "allgather_" in str(func) else args[0]  # (outputs, inputs, ...)
            tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.calls.append((_kind(str(func)), sum(t.nbytes for t in tensors)))
        return func(*args, **(kwargs or {}))

    def of(self, kind: str) -> list[int]:
        """The bytes of each call of ``kind``, in order."""
        return [num_bytes for found, num_bytes in self.calls if found == kind]


def _kind(op: str) -> str:
    name = op.split(".")[1].strip("_").replace("_into_tensor", "").replace("coalesced", "")
    return _KINDS.get(name.replace("_", ""), name)
