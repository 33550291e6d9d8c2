"""Logarithms of all probabilities, of which one a token, or their sum, is read.

    sum over v of log p_v = V (mean z - lse)

So transformers' ``LabelSmoother`` needs no more of a head that is cut than a loss does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from tplora.adapter.head.deferred_tensor import DeferredTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from tplora.adapter.head.deferred import DeferredLogits
    from tplora.adapter.head.statistics import LabelStatistics

__all__ = ["DeferredLogProbs"]


class DeferredLogProbs(DeferredTensor):
    """What stands for ``factor * log_softmax(logits)``; anything unknown is done to the whole."""

    handlers: ClassVar[dict[str, Callable[..., Any]]] = {}
    logits: DeferredLogits
    factor: float
    _known: dict[str, LabelStatistics]

    @staticmethod
    def of(
        logits: DeferredLogits,
        dtype: torch.dtype,
        factor: float = 1.0,
        known: dict[str, LabelStatistics] | None = None,
    ) -> DeferredLogProbs:
        """Nothing is computed yet; ``known`` is what was, for the same logits."""
        made = DeferredLogProbs.empty(logits.shape, dtype, logits.device)
        made.logits, made.factor = logits, factor
        made._known = {} if known is None else known
        return made

    def scaled(self, factor: float) -> DeferredLogProbs:
        """The same times a number."""
        return DeferredLogProbs.of(self.logits, self.dtype, self.factor * factor, self._known)

    def chosen(self, labels: torch.Tensor) -> torch.Tensor:
        """The entries of ``[..., 1]`` labels. Collective."""
        stats = self._known["last"] = self.logits.of_all_tokens(labels)
        return (stats.log_probs.reshape(labels.shape) * self.factor).to(self.dtype)

    def total(self, dtype: torch.dtype, *, keepdim: bool) -> torch.Tensor:
        """The sum over the vocabulary. Collective, if no label's entry was read before."""
        stats = self._known.get("last") or self.logits.of_all_tokens()
        sums = self.logits.shape[-1] * (stats.mean_logits - stats.lse) * self.factor
        sums = sums.reshape(self.logits.shape[:-1]).to(dtype)
        return sums.unsqueeze(-1) if keepdim else sums

    def whole(self) -> torch.Tensor:
        """The numbers. Collective."""
        return self.factor * torch.log_softmax(self.logits.whole(), dim=-1, dtype=self.dtype)


def _negative(_func: Any, log_probs: DeferredLogProbs) -> Any:
    return log_probs.scaled(-1.0)


def _gather(_func: Any, log_probs: DeferredLogProbs, dim: int, index: torch.Tensor) -> Any:
    is_one_each = index.shape == (*log_probs.shape[:-1], 1)
    if dim not in (-1, log_probs.ndim - 1) or not is_one_each:
        return NotImplemented
    return log_probs.chosen(index)


def _sum(
    _func: Any,
    log_probs: DeferredLogProbs,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
) -> Any:
    if dim not in (-1, log_probs.ndim - 1):
        return NotImplemented
    return log_probs.total(dtype or log_probs.dtype, keepdim=keepdim)


DeferredLogProbs.handlers.update(
    {"neg": _negative, "__neg__": _negative, "gather": _gather, "sum": _sum}
)
