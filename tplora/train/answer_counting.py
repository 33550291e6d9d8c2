"""Pairs and rated answers counted once: trl's losses of them are means over the rows of a batch.

    loss of a micro-batch = sum over its rows / rows,   n_k of them on data rank k

A rank's loss is its own rows' mean, and gradients are averaged over data ranks: so it is scaled by
n_k over the mean of all n. That is 1 but for the last batch of an epoch, which accelerate fills up
with rows from the epoch's start: these are taken out here. A rank that has none left keeps one,
of which nothing is learned, for every rank has to run the model alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tplora.errors import TrainError
from tplora.recipe.preference_rules import OF_BATCH
from tplora.train.counting import CountsOnce, gathering, num_own_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["CountsAnswersOnce"]

_SHARES = "rows_of_data_ranks"
"""The key under which a batch says how many rows each data rank has of it."""


class CountsAnswersOnce(CountsOnce):
    """Put before trl's ``DPOTrainer`` or ``KTOTrainer`` over a ``TploraModel``.

    Raises:
        TrainError: If the loss looks at a whole batch, of which each data rank has a part.
    """

    def __init__(self, model: Any, **kwargs: Any) -> None:
        if model.data is not None:
            _check_loss(getattr(kwargs.get("args"), "loss_type", ()))
        super().__init__(model=model, **kwargs)

    def _without_rows_from(
        self: Any, kept: int, batch: dict[str, Any], num_rows: int, batch_size: int
    ) -> dict[str, Any]:
        shares = [
            num_own_rows(num_rows, batch_size, data_rank=rank, data_size=self._data.size)
            for rank in range(self._data.size)
        ]
        rows = max(kept, 1)
        cut = {key: _first_rows(value, rows, batch_size) for key, value in batch.items()}
        if not kept:
            cut["completion_mask"] = torch.zeros_like(cut["completion_mask"])
        return {**cut, _SHARES: shares}

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kw: Any) -> Any:
        """Trl's loss and metrics; each data rank's rows are counted once, and no repeat is."""
        inputs = dict(inputs)
        shares: list[int] | None = inputs.pop(_SHARES, None)
        before = int(self._total_train_tokens)
        parent: Any = super(CountsOnce, self)
        with gathering(self.accelerator, lambda tensor: self._gather_own(tensor, shares)):
            found = parent.compute_loss(model, inputs, *args, **kw)
        self._count_tokens(inputs if shares is None else {**inputs, _SHARES: shares}, before)
        if shares is None:
            return found
        scale = shares[self._data.rank] * len(shares) / sum(shares)
        return (found[0] * scale, *found[1:]) if isinstance(found, tuple) else found * scale

    def _gather_own(self: Any, tensor: torch.Tensor, shares: list[int] | None) -> torch.Tensor:
        """Of each data rank: one number, or one for each of its rows."""
        if self._data is not None and tensor.ndim == 0:
            # A rank without wanted answers has a float32 zero for them, whatever the others have.
            gathered: torch.Tensor = self._gather_ranks(tensor.double()).to(tensor.dtype)
            return gathered
        if shares is None:
            return self._gather_ranks(tensor)  # type: ignore[no-any-return]
        padded = tensor.new_zeros(max(shares))
        padded[: len(tensor)] = tensor
        pieces = self._data.gather(padded).view(len(shares), -1)
        return torch.cat([piece[:own] for piece, own in zip(pieces, shares, strict=True)])

    def _own_mask(self: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        mask: torch.Tensor = inputs["attention_mask"]
        shares = inputs.get(_SHARES)
        return mask[:0] if shares is not None and not shares[self._data.rank] else mask

    def prediction_step(
        self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The trainer's; the loss is the mean over the rows of all data ranks."""
        inputs = self._ignore_repeats(inputs, self._eval_rows, self.args.eval_batch_size)
        parent: Any = super(CountsOnce, self)
        loss, logits, labels = parent.prediction_step(model, inputs, *args, **kwargs)
        return self._gather_ranks(loss.detach()).mean(), logits, labels


def _first_rows(value: torch.Tensor, num_rows: int, batch_size: int) -> torch.Tensor:
    """Of each batch in ``value``: DPO's hold all better answers, then all others."""
    return torch.cat([part[:num_rows] for part in torch.split(value, batch_size)])


def _check_loss(asked: str | Sequence[str]) -> None:
    for name in [asked] if isinstance(asked, str) else asked:
        if name in OF_BATCH:
            raise TrainError(
                f'train.loss_type = "{name}": {OF_BATCH[name]}, of which each data rank sees a '
                "part; train over tp_size alone, or take another loss"
            )
