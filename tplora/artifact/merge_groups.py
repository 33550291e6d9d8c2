"""Tensors that lie in the files in another form than in the model: experts, fused weights.

A group is read as a whole, turned into the model's parameters, merged, and turned back.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from tplora.artifact.base_tensors import read_whole
from tplora.artifact.merge_rows import applied, rounded
from tplora.artifact.tensor_file import Memory
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from tplora.artifact.base_tensors import BaseTensors
    from tplora.artifact.change import Change
    from tplora.artifact.merge_changes import ChangeReader
    from tplora.artifact.merge_plan import MergePlan, OutTensor
    from tplora.upstream.checkpoint_layout import WeightGroup

__all__ = ["GroupMerger"]


class GroupMerger:
    """Makes them one after the other, and keeps what comes of one group until it is asked for.

    Args:
        source: Where the base's tensors are read.
        plan: What is to be made.
        reader: Reads its changes.
        max_bytes: Of what is kept; what is more is made again.
    """

    def __init__(
        self, source: BaseTensors, plan: MergePlan, reader: ChangeReader, max_bytes: int
    ) -> None:
        self._source, self._plan, self._max_bytes = source, plan, max_bytes
        self._reader = reader
        self._changes: OrderedDict[str, list[Change]] = OrderedDict()
        self._made: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._work, self._out = Memory(), Memory()

    def tensor(self, tensor: OutTensor) -> torch.Tensor:
        """One tensor of a group, as it is to be written, until the next one is asked for."""
        if tensor.name not in self._made:
            (group,) = tensor.groups
            self._made.update(self._merged_group(group))
        found = self._made.pop(tensor.name)
        while sum(each.nbytes for each in self._made.values()) > self._max_bytes:
            self._made.popitem(last=False)
        return rounded(found, tensor, self._out)

    def _merged_group(self, group: WeightGroup) -> dict[str, torch.Tensor]:
        held = {name: read_whole(self._source, name) for name in group.names}
        parameters = group.to_model(held)
        back = group.to_files(parameters)
        if not all(torch.equal(back[name], held[name]) for name in held):
            raise ArtifactError(
                f"{self._source.checkpoint.folder}: {group.names[0]} and {len(held) - 1} more are "
                "in a form that transformers reads and cannot write again; load the base with "
                "transformers, save it and merge into that"
            )
        del back, held
        dtype = self._reader.dtype_of(group.names[0])
        merged = {}
        for name in list(parameters):
            base = parameters.pop(name)
            index = group.index or 0
            rows = slice(index, index + base.shape[0])
            merged[name] = (
                applied(self._read_changes(name), base, rows, self._work).clone()
                if name in self._plan.changes
                else base.to(dtype)
            )
        return group.to_files(merged)

    def _read_changes(self, parameter: str) -> list[Change]:
        """The changes of a parameter; those of the last few are kept, for the experts in turn."""
        if parameter not in self._changes:
            while len(self._changes) > 1:
                self._changes.popitem(last=False)
            self._changes[parameter] = self._reader.read(parameter)
            for change in self._changes[parameter]:
                change.prepare()
        self._changes.move_to_end(parameter)
        return self._changes[parameter]
