"""What can be read from logits that are cut over ranks, without the whole of them.

    cross_entropy    ignored tokens dropped before the head, label smoothing, every reduction
    log_softmax      a label's entry, or the sum over the vocabulary: transformers' LabelSmoother
    logsumexp        a z-loss
    argmax           metrics

Each is one pass over the tokens in chunks, and one all-gather of seven numbers a token; of three
for cross_entropy without smoothing.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from tplora.adapter.head.deferred import DeferredLogits
from tplora.adapter.head.log_probs import DeferredLogProbs
from tplora.adapter.head.statistics import LabelStatistics, label_statistics

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["token_statistics"]

_IGNORED = -100
_HANDLERS = DeferredLogits.handlers


def token_statistics(logits: torch.Tensor, labels: torch.Tensor) -> LabelStatistics:
    """Statistics of ``[N]`` labels under ``[N, V]`` logits, which may be plain ones. Collective."""
    if isinstance(logits, DeferredLogits):
        return logits.recipe.statistics(labels)
    size = logits.shape[-1]
    return label_statistics(
        (logits,), (), labels, lambda z: z, vocab_start=0, vocab_size=size, group=None
    )


# ---- element by element


def _elementwise(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if not all(_is_number(one) for one in (*args, *kwargs.values())):
        return NotImplemented
    args, kwargs = _detached(args), dict(zip(kwargs, _detached(kwargs.values()), strict=True))
    return logits.changed(lambda z: func(z, *args, **kwargs))


def _is_number(value: object) -> bool:
    """What acts on every logit alike, and takes no gradient."""
    if isinstance(value, torch.Tensor):
        return type(value) is not DeferredLogits and value.numel() == 1 and not value.requires_grad
    return value is None or isinstance(value, (int, float, bool, torch.dtype, torch.device, str))


def _detached(values: Any) -> tuple[Any, ...]:
    return tuple(v.detach().reshape(()) if isinstance(v, torch.Tensor) else v for v in values)


def _in_place(func: Any, logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """The object itself changes: who holds it sees the change, as with numbers."""
    if logits.known is not None:
        return NotImplemented
    found = _elementwise(func, logits, *args, **kwargs)
    if found is NotImplemented or found.dtype != logits.dtype:
        return NotImplemented
    logits.recipe = found.recipe
    return logits


_ELEMENTWISE = (
    "float double half bfloat16 to type div true_divide __truediv__ mul multiply __mul__ __rmul__ "
    "add __add__ __radd__ sub __sub__ __rsub__ rsub neg __neg__ tanh sigmoid clamp contiguous clone"
)
_IN_PLACE = "div_ mul_ add_ sub_ tanh_ clamp_ neg_ __itruediv__ __imul__ __iadd__ __isub__"
_HANDLERS |= dict.fromkeys(_ELEMENTWISE.split(), _elementwise)
_HANDLERS |= dict.fromkeys(_IN_PLACE.split(), _in_place)


def _detach(_func: Any, logits: DeferredLogits) -> Any:
    return logits.detached()


def _register_hook(func: Any, logits: DeferredLogits, hook: Callable[..., Any]) -> Any:
    """Backward of a loss from them reaches the hidden states; else what is trained of the head."""
    hidden = logits.recipe.inputs[0]
    return func(hidden, hook) if hidden.requires_grad else RemovableHandle(OrderedDict())


_HANDLERS |= {"detach": _detach, "register_hook": _register_hook}


# ---- some of the tokens


def _index(_func: Any, logits: DeferredLogits, index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    if not all(_is_index(one) for one in parts):
        return NotImplemented
    taken = sum(one.ndim if isinstance(one, torch.Tensor) else one is not ... for one in parts)
    has_rest = any(one is ... for one in parts)
    # The last dim is named by the last part, where all are named or the rest comes before it.
    names_last = taken == logits.ndim or (has_rest and parts[-1] is not ...)
    is_all = isinstance(parts[-1], slice) and parts[-1] == slice(None)
    if taken > logits.ndim or (names_last and not is_all):
        return NotImplemented
    return logits.picked(lambda one: one[index])


def _is_index(one: object) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is not DeferredLogits and one.dtype in (torch.bool, torch.int64)
    return one is ... or (isinstance(one, (int, slice)) and not isinstance(one, bool))


def _reshape(func: Any, logits: DeferredLogits, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not all(isinstance(one, int) for one in sizes) or sizes[-1] != logits.shape[-1]:
        return NotImplemented
    return logits.picked(lambda one: one.reshape(*sizes[:-1], one.shape[-1]))


def _flatten(_func: Any, logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return logits.picked(lambda one: one.flatten(start_dim, end_dim))


_HANDLERS |= {"__getitem__": _index, "view": _reshape, "reshape": _reshape, "flatten": _flatten}


# ---- numbers


def _cross_entropy(
    _func: Any,
    logits: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = _IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``(1 - s) (lse - z[label]) + s (lse - mean z)`` of each token that is not ignored.

    Ignored tokens go through no head.
    """
    is_known = weight is None and size_average is None and reduce is None
    if not is_known or target.ndim != 1 or target.is_floating_point() or logits.ndim != 2:
        return NotImplemented
    counted = (target != ignore_index).nonzero().squeeze(1)
    chosen = logits.picked(lambda one: one.index_select(0, counted))
    labels = target.index_select(0, counted)
    if label_smoothing:
        stats = chosen.recipe.statistics(labels)
        losses = torch.lerp(-stats.log_probs, stats.lse - stats.mean_logits, label_smoothing)
    else:
        losses = -chosen.recipe.log_probs(labels)
    losses = losses.to(logits.dtype)
    if reduction == "none":
        return losses.new_zeros(target.shape).index_copy(0, counted, losses)
    return losses.sum() if reduction == "sum" else losses.sum() / counted.numel()


def _logsumexp(_func: Any, logits: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    if not _is_last(dim, logits):
        return NotImplemented
    lse = logits.of_all_tokens().lse.reshape(logits.shape[:-1]).to(logits.dtype)
    return lse.unsqueeze(-1) if keepdim else lse


def _argmax(_func: Any, logits: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    if not _is_last(dim, logits):
        return NotImplemented
    top = logits.of_all_tokens().top.reshape(logits.shape[:-1])
    return top.unsqueeze(-1) if keepdim else top


def _log_softmax(
    func: Any, logits: DeferredLogits, dim: Any = None, dtype: Any = None, **_kwargs: Any
) -> Any:
    if not _is_last(dim, logits):
        return NotImplemented
    return DeferredLogProbs.of(logits, dtype or logits.dtype)


def _is_last(dim: Any, logits: torch.Tensor) -> bool:
    return isinstance(dim, int) and dim in (-1, logits.ndim - 1)


_HANDLERS |= {
    "cross_entropy": _cross_entropy,
    "logsumexp": _logsumexp,
    "argmax": _argmax,
    "log_softmax": _log_softmax,
}
