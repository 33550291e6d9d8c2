"""Each row counted once, and every number of all data ranks: rows, tokens, losses, metrics.

    loss of a step = sum over all rows of the step / their labelled tokens

A step's rows are shared out batch by batch, the tp group being one rank of it. Where the last batch
of an epoch has too few rows to go round, accelerate fills it up with rows from the epoch's start.
Here these repeats have no labels: they count nowhere, and each row is learned once in an epoch.

Rows that are joined into packs are shared out pack by pack, each of them a row of the above.

Evaluation is by the same rule: batches of all data ranks are one batch, its loss is per token, and
each of its rows has it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tplora.errors import TrainError
from tplora.train.packing import NUM_TOKENS, MarksPacks
from tplora.train.pending import PendingNumber, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tplora.adapter.data_axis import DataAxis

__all__ = ["CountsOnce", "gathering", "num_own_rows"]

_IGNORED = -100


def num_own_rows(num_rows: int, batch_size: int, *, data_rank: int, data_size: int) -> int:
    """Of a rank's last batch of ``num_rows`` in all, how many rows are not repeats."""
    rest = num_rows % (batch_size * data_size)
    if rest == 0:
        return batch_size
    return min(max(rest - data_rank * batch_size, 0), batch_size)


class CountsOnce:
    """Put before trl's ``SFTTrainer`` over a ``TploraModel``.

    Raises:
        TrainError: If the arguments ask for what cannot be shared out exactly over data axes.
    """

    _last_batch: tuple[torch.Tensor, tuple[slice, ...]] | None = None
    """The labels of the batch with repeats, and the part of it that is none."""
    _uncounted_tokens = torch.zeros((), dtype=torch.int64)
    """This rank's since the last ``settle_metrics``."""

    def __init__(self, model: Any, **kwargs: Any) -> None:
        if model.data is not None:
            _check_arguments(kwargs.get("args"))
        parent: Any = super()
        parent.__init__(model=model, **kwargs)
        if self._joins_rows:
            self.data_collator: Any = MarksPacks(self.data_collator)

    @property
    def _joins_rows(self: Any) -> bool:
        return bool(getattr(self, "padding_free", False))

    @property
    def _data(self: Any) -> DataAxis | None:
        axis: DataAxis | None = self.model.data
        return axis

    def _gather_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of each data rank once: the ranks of a tp group hold the same."""
        return tensor if self._data is None else self._data.gather(tensor)

    # ---- rows

    def get_batch_samples(self: Any, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, from batches whose repeats have no labels."""
        parent: Any = super()
        size, rows = self._train_batch_size, _length(self.train_dataset)
        batches = self._without_repeats(epoch_iterator, rows, size)
        return parent.get_batch_samples(batches, *args, **kwargs)

    def _without_repeats(
        self: Any, batches: Iterator[Any], num_rows: int | None, batch_size: int
    ) -> Iterator[Any]:
        for batch in batches:
            yield self._ignore_repeats(batch, num_rows, batch_size)

    def _ignore_repeats(
        self: Any, batch: dict[str, Any], num_rows: int | None, batch_size: int
    ) -> dict[str, Any]:
        sizes = batch.get(NUM_TOKENS)
        batch = {key: value for key, value in batch.items() if key != NUM_TOKENS}
        is_last = self.accelerator.gradient_state.end_of_dataloader
        if self._data is None or num_rows is None or not is_last or self._drops_last:
            return batch
        if num_rows % (batch_size * self._data.size) == 0:
            return batch
        kept = num_own_rows(
            num_rows, batch_size, data_rank=self._data.rank, data_size=self._data.size
        )
        shortened: dict[str, Any]
        if sizes is None:
            shortened = self._without_rows_from(kept, batch, num_rows, batch_size)
        else:  # packs are one sequence
            shortened = self._only((slice(None), slice(int(sizes[:kept].sum()))), batch)
        return shortened

    def _without_rows_from(
        self: Any, kept: int, batch: dict[str, Any], num_rows: int, batch_size: int
    ) -> dict[str, Any]:
        """The last batch of ``num_rows``, in which rows from ``kept`` on count nowhere."""
        shortened: dict[str, Any] = self._only((slice(kept),), batch)
        return shortened

    def _only(self, own: tuple[slice, ...], batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, of which nothing but the part ``own`` is learned or counted."""
        labels = torch.full_like(batch["labels"], _IGNORED)
        labels[own] = batch["labels"][own]
        self._last_batch = labels, own
        return {**batch, "labels": labels}

    @property
    def _drops_last(self: Any) -> bool:
        return bool(self.args.dataloader_drop_last)

    def _own_mask(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The attention mask of the rows that are no repeats; joined ones have no padding."""
        found: torch.Tensor | None = inputs.get("attention_mask")
        mask = torch.ones_like(inputs["input_ids"]) if found is None else found
        last = self._last_batch
        if (
            last is None
            or "labels" not in inputs
            or not torch.equal(inputs["labels"], last[0].to(mask.device))
        ):
            return mask
        return mask[last[1]]

    # ---- training

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Trl's loss and metrics; each data rank is counted once, and no repeat is."""
        before = self._total_train_tokens
        parent: Any = super()
        with gathering(self.accelerator, self._gather_pending):
            found = parent.compute_loss(model, inputs, *args, **kw)
        self._count_tokens(inputs, before)
        return found

    def _count_tokens(self: Any, inputs: dict[str, Any], before: int) -> None:
        """What trl would count as often as a tp group has ranks, or divide by that."""
        if self.model.training:
            self._total_train_tokens = before
            self._uncounted_tokens = self._uncounted_tokens + self._own_mask(inputs).sum()

    def _gather_pending(self, tensor: torch.Tensor) -> PendingNumber:
        return PendingNumber(self._gather_ranks(tensor))

    def settle_metrics(self: Any) -> None:
        """Read what was measured since the last time: before it is logged, saved or evaluated.

        Collective over data axes.
        """
        tokens = self._gather_ranks(self._uncounted_tokens.to(self.args.device)).sum()
        self._total_train_tokens += int(tokens)
        self._uncounted_tokens = torch.zeros_like(tokens)
        train = self._metrics["train"]
        if "num_tokens" in train:
            train["num_tokens"] = [self._total_train_tokens]
        for measured in self._metrics.values():
            for key, found in measured.items():
                measured[key] = settled(found)

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trl's, which adds what was measured."""
        self.settle_metrics()
        parent: Any = super()
        parent.log(logs, *args, **kwargs)

    def _track_num_input_tokens(self: Any, inputs: dict[str, Any]) -> None:
        parent: Any = super()
        # Without a mask it would count what is no padding token, which may be the end token too.
        parent._track_num_input_tokens({**inputs, "attention_mask": self._own_mask(inputs)})
        if self.accelerator.sync_gradients:
            self._last_batch = None

    def floating_point_ops(self: Any, inputs: dict[str, Any]) -> float:
        """This rank's share; the trainer adds up those of all ranks."""
        parent: Any = super()
        return float(parent.floating_point_ops(inputs)) / int(self.model.plan.tp_size)

    # ---- evaluation

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, over each row once."""
        self._eval_rows = _length(getattr(dataloader, "dataset", None))
        self.gather_function = self._gather_rows
        parent: Any = super()
        return self._of_first_rank(parent.evaluation_loop(dataloader, *args, **kwargs))

    def _of_first_rank(self: Any, found: Any) -> Any:
        """The first rank's numbers on every rank: what is decided by them is decided alike."""
        if self.model.mesh is None:
            return found
        told = [found.metrics]
        dist.broadcast_object_list(told, src=0)
        return found._replace(metrics=told[0])

    def _gather_rows(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        """One entry a row, in the rows' order, without those of repeats."""
        rows: torch.Tensor = self._gather_ranks(tensor)
        is_last = self.accelerator.gradient_state.end_of_dataloader
        if not is_last or self._eval_rows is None or self._drops_last:
            return rows
        if self._joins_rows and tensor.ndim > 1:
            return rows  # of whole batches: what is repeated in them has no labels
        size = self.args.eval_batch_size * (1 if self._data is None else self._data.size)
        return rows[: self._eval_rows % size or size]

    def prediction_step(
        self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The trainer's; the loss is that of the batches of all data ranks, per token."""
        inputs = self._ignore_repeats(inputs, self._eval_rows, self.args.eval_batch_size)
        parent: Any = super()
        loss, logits, labels = parent.prediction_step(model, inputs, *args, **kwargs)
        if self._data is not None and loss is not None and "labels" in inputs:
            own = (inputs["labels"][:, 1:] != _IGNORED).sum().to(loss)
            sums = self._data.gather(torch.stack([loss.detach() * own, own])).view(-1, 2).sum(0)
            loss = sums[0] / sums[1].clamp(min=1)
        return loss, logits, labels


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


@contextlib.contextmanager
def gathering(accelerator: Any, gather: Callable[[Any], Any]) -> Iterator[None]:
    """While open, what is gathered for metrics comes from each data rank once.

    accelerate gathers from every rank of a tp group, and of a last batch drops what it takes for
    padding, which a number for each rank is not.
    """
    accelerator.gather_for_metrics = accelerator.gather = gather
    try:
        yield
    finally:
        del accelerator.gather_for_metrics, accelerator.gather


def _check_arguments(args: Any) -> None:
    """Refuse what cannot be shared out exactly; have each rank read an iterable dataset itself.

    accelerate would read it on the first rank and give every data rank the same rows of it.
    """
    if args is None:
        return
    if args.accelerator_config.dispatch_batches:
        raise TrainError(
            "accelerator_config.dispatch_batches = true: accelerate would give every data rank the "
            "same rows; leave it out"
        )
    args.accelerator_config.dispatch_batches = False
    if args.train_sampling_strategy == "batch_rebalance":
        raise TrainError(
            'train.train_sampling_strategy = "batch_rebalance": it would give the ranks of a tp '
            'group different rows; use "random", "sequential" or "group_by_length"'
        )
