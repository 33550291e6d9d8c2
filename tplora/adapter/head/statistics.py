"""Log-probabilities of labels from a head whose vocabulary is cut over ranks.

    # N labelled tokens   H hidden size   V vocabulary   P tp_size

    log p(label) = z[label] - logsumexp(z),   z = head(h) over the whole vocabulary

Each rank computes the logits of its part of the vocabulary, chunk by chunk, and keeps seven numbers
a token, or three where a loss reads no more; one all-gather of these gives every rank the
statistics of the whole vocabulary. No rank holds ``[N, V]``, nor ``[N, V/P]``: only
``[chunk, V/P]``.

Logits of a frozen head are computed once: while a chunk is there, forward takes the slope
``d log p(label) / dh`` as well, ``[n, H]``, and backward multiplies it with what comes in. That
needs the whole vocabulary's statistics of the chunk: it is done in one process, and where all
tokens are one chunk. Else, where something of the head is trained, and for gradients of other
statistics, backward computes the chunk again.

Source: Shoeybi et al. 2019, section 3 (fusing the output layer with the loss); Wijmans et al. 2024
    for computing the chunk again; Hsu et al. 2024 for the gradient that forward computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tplora.adapter.head import softmax
from tplora.adapter.head.chunked import ChunkedHead

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tplora.adapter.head.chunked import Project

__all__ = ["LabelStatistics", "label_log_probs", "label_statistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStatistics:
    """Per labelled token, over the whole vocabulary, equal on all ranks; ``[N]`` float32 each."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    lse: torch.Tensor
    """The logarithm of the sum of the exponentials of the logits."""
    mean_logits: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    is_top1: torch.Tensor
    top: torch.Tensor
    """The token of the largest logit, of equal ones the first."""


_OUTPUTS = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1", "top")
_NUM_DIFFERENTIABLE = 4


def label_statistics(
    inputs: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    project: Project,
    *,
    vocab_start: int,
    vocab_size: int,
    group: ProcessGroup | None,
) -> LabelStatistics:
    """Statistics of each label under a head that is cut on the vocabulary.

    Gradients flow from ``log_probs``, ``entropy``, ``lse`` and ``mean_logits`` to ``inputs`` and
    ``parameters``. Those of ``inputs`` are this rank's part of a sum: pass them through
    ``replicate_input`` before.

    Communication: forward, one all-gather of ``[7, N]`` float32; backward, none.

    Args:
        inputs: Tensors ``[N, H]``, replicated; cut into chunks of tokens.
        parameters: The head's own tensors on this rank.
        labels: ``[N]``, no ignored ones left.
        project: ``project(*inputs, *parameters)`` gives this rank's logits ``[n, V/P]``, with all
            that the model does to them before the softmax.
        vocab_start: The first token of this rank's part.
        vocab_size: V.
        group: The tp group, or None when the head is whole.
    """
    head = ChunkedHead(project, len(inputs), vocab_start, vocab_size, group)
    outputs = _apply(head, labels, inputs, parameters)
    return LabelStatistics(**dict(zip(_OUTPUTS, outputs, strict=True)))


def label_log_probs(
    inputs: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    project: Project,
    *,
    vocab_start: int,
    vocab_size: int,
    group: ProcessGroup | None,
) -> torch.Tensor:
    """``label_statistics(...).log_probs``, in fewer passes over the logits.

    Communication: forward, one all-gather of ``[3, N]`` float32; backward, none.
    """
    head = ChunkedHead(project, len(inputs), vocab_start, vocab_size, group, is_label_only=True)
    return _apply(head, labels, inputs, parameters)[0]


def _apply(
    head: ChunkedHead,
    labels: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    parameters: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, ...]:
    takes_slopes = (
        torch.is_grad_enabled()
        and any(one.requires_grad for one in inputs)
        and not any(one.requires_grad for one in parameters)
        and len(labels) > 0
        and (head.group is None or len(labels) <= head.chunk_size)
    )
    outputs: tuple[torch.Tensor, ...] = _LabelStatistics.apply(  # type: ignore[no-untyped-call]
        head, takes_slopes, labels, *inputs, *parameters
    )
    return outputs


class _LabelStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: ChunkedHead,
        takes_slopes: bool,
        labels: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        own = labels - head.vocab_start
        slopes: list[torch.Tensor] = []
        if takes_slopes:
            wanted = ctx.needs_input_grad[3 : 3 + head.num_inputs]
            stats, slopes = _with_slopes(head, own, tensors, wanted)
        else:
            stats = _statistics(head, own, tensors)
        ctx.head, ctx.autocast, ctx.num_slopes = head, _autocast_of(tensors[0]), len(slopes)
        ctx.set_materialize_grads(False)
        again: tuple[torch.Tensor | None, ...] = ()
        if not (takes_slopes and head.is_label_only):
            again = (own, stats["max"], stats["log_total"], stats.get("entropy"), *tensors)
        ctx.save_for_backward(*slopes, *again)
        if head.is_label_only:
            return (stats["log_probs"],)
        outputs = (
            stats["log_probs"],
            stats["entropy"],
            stats["max"] + stats["log_total"],
            stats["sum"] / head.vocab_size,
            stats["log_sum_sq_probs"],
            stats["top"] == labels,
            stats["top"],
        )
        ctx.mark_non_differentiable(*outputs[_NUM_DIFFERENTIABLE:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Any, ...]:
        slopes, again = ctx.saved_tensors[: ctx.num_slopes], ctx.saved_tensors[ctx.num_slopes :]
        d_log_probs, *others = grad_outputs[:_NUM_DIFFERENTIABLE]
        wanted = ctx.needs_input_grad[3:]
        if slopes and all(one is None for one in others):
            left = iter(slopes)
            grads = [
                _scaled(next(left), d_log_probs) if is_wanted else None for is_wanted in wanted
            ]
        else:
            others += [None] * (_NUM_DIFFERENTIABLE - 1 - len(others))
            grads = _compute_again(ctx, wanted, again, (d_log_probs, *others))
        return (None, None, None, *grads)


def _statistics(
    head: ChunkedHead, own: torch.Tensor, tensors: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Of all tokens, after one all-gather."""
    parts = [
        head.partial(head.logits(pieces), own[rows])[0] for rows, pieces in head.chunks(tensors)
    ]
    num_numbers = softmax.num_statistics(is_label_only=head.is_label_only)
    partial = torch.cat(parts, dim=1) if parts else tensors[0].new_zeros((num_numbers, 0))
    return softmax.combine(_gather(partial, head.group))


def _with_slopes(
    head: ChunkedHead,
    own: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    wanted: tuple[bool, ...],
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The same, and of each input that is wanted ``d log p(label) / d input``, ``[N, H]``."""
    stats: list[dict[str, torch.Tensor]] = []
    slopes: list[tuple[torch.Tensor, ...]] = []
    for rows, pieces in head.chunks(tensors):
        leaves = [
            piece.detach().requires_grad_(is_wanted)
            for piece, is_wanted in zip(pieces, wanted, strict=False)
        ]
        with torch.enable_grad():
            logits = head.logits((*leaves, *pieces[head.num_inputs :]))
        partial, weights = head.partial(logits.detach(), own[rows])
        stats.append(softmax.combine(_gather(partial, head.group)))
        slope = softmax.label_slope(weights, partial[0], own[rows], stats[-1])
        with torch.autocast(**_autocast_of(leaves[0]) | {"enabled": False}):
            inputs = [leaf for leaf in leaves if leaf.requires_grad]
            slopes.append(torch.autograd.grad(logits, inputs, slope))
    whole = {name: torch.cat([one[name] for one in stats]) for name in stats[0]}
    return whole, [torch.cat(one) for one in zip(*slopes, strict=True)]


def _scaled(slope: torch.Tensor, d_log_probs: torch.Tensor) -> torch.Tensor:
    return (slope * d_log_probs[:, None]).to(slope.dtype)


def _compute_again(
    ctx: Any,
    wanted: tuple[bool, ...],
    again: tuple[torch.Tensor, ...],
    grad_outputs: tuple[torch.Tensor | None, ...],
) -> list[torch.Tensor | None]:
    """Gradients of the tensors, from logits that are computed chunk by chunk once more."""
    head: ChunkedHead = ctx.head
    own, *statistics = again[:4]
    tensors = again[4:]
    grads = [_zeros(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
    per_token = (*statistics, *grad_outputs)
    for rows, pieces in head.chunks(tensors):
        leaves = [p.detach().requires_grad_(w) for p, w in zip(pieces, wanted, strict=True)]
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            logits = head.logits(tuple(leaves))
        of_rows: Any = (None if one is None else one[rows, None] for one in per_token)
        grad_logits = softmax.grad_logits(logits.detach(), own[rows], head.vocab_size, *of_rows)
        fresh = torch.autograd.grad(logits, [t for t in leaves if t.requires_grad], grad_logits)
        totals = [
            grad[rows] if k < head.num_inputs else grad
            for k, grad in enumerate(grads)
            if grad is not None
        ]
        for total, part in zip(totals, fresh, strict=True):
            total.add_(part)
    return [None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True)]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Where a gradient is summed over chunks: in float32 at least."""
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _autocast_of(tensor: torch.Tensor) -> dict[str, Any]:
    """How products are rounded here, for backward, which torch runs without autocast."""
    kind = tensor.device.type
    if not torch.amp.is_autocast_available(kind):  # such as meta, on which nothing is rounded
        return {"device_type": "cpu", "enabled": False}
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
    }


def _gather(partial: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """``[P, 7, N]`` from every rank's ``[7, N]``; one all-gather."""
    if group is None:
        return partial[None]
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, partial.contiguous(), group=group)
    return torch.stack(parts)
