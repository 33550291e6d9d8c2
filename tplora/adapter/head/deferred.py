"""Logits that are computed when somebody reads them, and only as many as are read.

    model:  z = head(h)    z = cap * tanh(z / cap)        loss = cross_entropy(z, labels)
    here:   h              h, and what is to be done      statistics of labels, in chunks

While a model runs for its loss, its head hands on this object instead of ``[T, V]`` numbers. What
the model's own code does to it element by element is noted, what it picks of the tokens is picked
of the hidden states, and a loss is taken from shards and in chunks of tokens (``reading.py``). So
every model's softcapping and scaling, and its own loss, hold as they are written. Anything else
that is done to it is done to the whole logits, which are then computed and gathered: right, and as
large as they are.

To read them is collective: every rank does it, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tplora.adapter.head.deferred_tensor import DeferredTensor
from tplora.adapter.head.statistics import LabelStatistics, label_log_probs, label_statistics
from tplora.collectives.operators import gather_last_dim
from tplora.errors import ShardError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from tplora.adapter.head.projection import Projection

    Change = Callable[[torch.Tensor], torch.Tensor]

__all__ = ["DeferredLogits", "HeadShard", "deferred"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShard:
    """Where this rank's part of the vocabulary lies."""

    vocab_start: int
    vocab_size: int
    group: ProcessGroup | None
    """The tp group, or None where the head is whole."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to compute the logits of this rank's part."""

    project: Projection
    shard: HeadShard
    inputs: tuple[torch.Tensor, ...]
    """``[..., H]``: what the head multiplies with; dropped already, for each adapter."""
    changes: tuple[Change, ...] = ()
    has_graph: bool = True
    """False once it was detached, or made where no gradient is kept."""
    versions: tuple[int, ...] = ()
    """How often each tensor had been written to when the model ran."""

    def check_unchanged(self) -> None:
        """Raises ShardError if logits would be those of another model by now."""
        if self.versions != _versions(self.project):
            raise ShardError(
                "logits: are computed when they are read, and the head's weights have changed "
                "since the model ran; read them before an optimizer steps and before an adapter is "
                "merged, or run the model again without labels in evaluation mode"
            )

    def takes_gradient(self) -> bool:
        """Whether logits that were computed now would have a graph."""
        given = (*self.inputs, *self.project.parameters)
        is_wanted = torch.is_grad_enabled() and self.has_graph
        return is_wanted and any(one.requires_grad for one in given)

    def logits(self, *given: torch.Tensor) -> torch.Tensor:
        """This rank's logits of some rows, changed in float32, or in float64."""
        z = self.project(*given)
        return self._changed(z if z.dtype == torch.float64 else z.float())

    def _changed(self, z: torch.Tensor) -> torch.Tensor:
        for change in self.changes:
            z = change(z)
        return z

    def statistics(self, labels: torch.Tensor) -> LabelStatistics:
        """Of each row, ``[N]`` labels for ``[N, H]`` inputs. Collective, one all-gather."""
        found: LabelStatistics = self._read(label_statistics, labels)
        return found

    def log_probs(self, labels: torch.Tensor) -> torch.Tensor:
        """``statistics(labels).log_probs`` alone. Collective, one all-gather."""
        found: torch.Tensor = self._read(label_log_probs, labels)
        return found

    def _read(self, read: Callable[..., Any], labels: torch.Tensor) -> Any:
        self.check_unchanged()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            return read(
                self.inputs,
                self.project.parameters,
                labels,
                self.logits,
                vocab_start=self.shard.vocab_start,
                vocab_size=self.shard.vocab_size,
                group=self.shard.group,
            )

    def whole(self) -> torch.Tensor:
        """``[..., V]``, as the model's own head gives them. Collective, one all-gather."""
        self.check_unchanged()
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.has_graph):
            z = self.project(*self.inputs, *self.project.parameters)
            if self.shard.group is not None:
                z = gather_last_dim(z, self.shard.vocab_size, self.shard.group)
            return self._changed(z)


class DeferredLogits(DeferredTensor):
    """What stands for logits ``[..., V]`` of the whole vocabulary, equal on all ranks."""

    handlers: ClassVar[dict[str, Callable[..., Any]]] = {}
    """Filled by ``reading.py``."""
    recipe: _Recipe
    known: torch.Tensor | None
    """The numbers, once they were asked for."""

    @staticmethod
    def of(recipe: _Recipe, dtype: torch.dtype) -> DeferredLogits:
        """Logits by ``recipe``, which says their size; without a graph if none is kept now."""
        recipe = replace(recipe, has_graph=recipe.has_graph and torch.is_grad_enabled())
        shape = (*recipe.inputs[0].shape[:-1], recipe.shard.vocab_size)
        made = DeferredLogits.empty(shape, dtype, recipe.inputs[0].device, recipe.takes_gradient())
        made.recipe, made.known = recipe, None
        return made

    def whole(self) -> torch.Tensor:
        """The numbers, computed once. Collective."""
        if self.known is None:
            self.known = self.recipe.whole()
        return self.known

    def picked(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> DeferredLogits:
        """The same of other tokens: ``pick`` takes ``[..., H]`` and keeps the last dim."""
        inputs = tuple(pick(one) for one in self.recipe.inputs)
        return DeferredLogits.of(replace(self.recipe, inputs=inputs), self.dtype)

    def changed(self, change: Change) -> DeferredLogits:
        """The same after an elementwise ``change``; a number is tried to learn its dtype."""
        dtype = change(torch.zeros(1, dtype=self.dtype)).dtype
        changes = (*self.recipe.changes, change)
        return DeferredLogits.of(replace(self.recipe, changes=changes), dtype)

    def of_all_tokens(self, labels: torch.Tensor | None = None) -> LabelStatistics:
        """Statistics of all tokens, one after the other; without labels, of token 0. Collective."""
        if labels is None:
            size = self.shape[:-1].numel()
            labels = torch.zeros(size, dtype=torch.int64, device=self.device)
        flat = self.picked(lambda one: one.reshape(-1, one.shape[-1]))
        return flat.recipe.statistics(labels.reshape(-1))

    def detached(self) -> DeferredLogits:
        """The same without gradients."""
        return DeferredLogits.of(replace(self.recipe, has_graph=False), self.dtype)


def deferred(
    project: Projection, shard: HeadShard, hidden: torch.Tensor, dtype: torch.dtype
) -> DeferredLogits:
    """The logits of a head of which this rank holds ``shard``; nothing is computed yet."""
    assert project.inputs[0].shape == hidden.shape
    recipe = _Recipe(project, shard, project.inputs, versions=_versions(project))
    return DeferredLogits.of(recipe, dtype)


def _versions(project: Projection) -> tuple[int, ...]:
    given = (*project.inputs, *project.parameters)
    return tuple(0 if one.is_inference() else one._version for one in given)
