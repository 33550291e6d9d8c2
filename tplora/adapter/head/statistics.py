"""Log-probabilities of labels from a head whose vocabulary is cut over ranks.

    # N labelled tokens   H hidden size   V vocabulary   P tp_size

    log p(label) = z[label] - logsumexp(z),   z = head(h) over the whole vocabulary

Each rank computes the logits of its part of the vocabulary, chunk by chunk, and keeps seven numbers
a token; one all-gather of these gives every rank the statistics of the whole vocabulary. No
rank holds ``[N, V]``, nor ``[N, V/P]``: only ``[chunk, V/P]``. Backward computes the chunk again.

Source: Shoeybi et al. 2019, section 3 (fusing the output layer with the loss); Wijmans et al. 2024
    for computing the chunk again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    Project = Callable[..., torch.Tensor]

__all__ = ["LabelStatistics", "label_statistics"]

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk in float32, per rank: large enough for full-speed products."""


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
    head = _Head(project, len(inputs), vocab_start, vocab_size, group)
    outputs: tuple[torch.Tensor, ...] = _LabelStatistics.apply(  # type: ignore[no-untyped-call]
        head, labels, *inputs, *parameters
    )
    return LabelStatistics(**dict(zip(_OUTPUTS, outputs, strict=True)))


@dataclass(frozen=True, slots=True)
class _Head:
    """What both directions of ``_LabelStatistics`` need and autograd does not."""

    project: Project
    num_inputs: int
    vocab_start: int
    vocab_size: int
    group: ProcessGroup | None

    def logits(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """This rank's logits of one chunk, float32 (float64 for a float64 model)."""
        z = self.project(*tensors)
        return z if z.dtype == torch.float64 else z.float()

    def chunks(
        self, tensors: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
        """Rows of the inputs, few enough that their logits stay small, with the parameters."""
        num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        step = max(1, CHUNK_BYTES // (4 * -(-self.vocab_size // num_ranks)))
        inputs, parameters = tensors[: self.num_inputs], tensors[self.num_inputs :]
        for start in range(0, inputs[0].shape[0], step):
            rows = slice(start, start + step)
            yield rows, (*(tensor[rows] for tensor in inputs), *parameters)


class _LabelStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: _Head, labels: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        own = labels - head.vocab_start
        parts = [
            _partial_statistics(head.logits(pieces), own[rows], head.vocab_start)
            for rows, pieces in head.chunks(tensors)
        ]
        partial = torch.cat(parts, dim=1) if parts else tensors[0].new_zeros((7, 0))
        stats = _combine(_gather(partial, head.group))
        ctx.head, ctx.autocast = head, _autocast_of(tensors[0])
        ctx.save_for_backward(own, stats["max"], stats["log_total"], stats["entropy"], *tensors)
        outputs = (
            (stats["label"] - stats["max"]) - stats["log_total"],
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
        own, *statistics = ctx.saved_tensors[:4]
        tensors = ctx.saved_tensors[4:]
        head: _Head = ctx.head
        wanted = ctx.needs_input_grad[2:]
        grads = [_zeros(t) if w else None for t, w in zip(tensors, wanted, strict=True)]
        per_token = (*statistics, *grad_outputs[:_NUM_DIFFERENTIABLE])
        for rows, pieces in head.chunks(tuple(tensors)):
            leaves = [p.detach().requires_grad_(w) for p, w in zip(pieces, wanted, strict=True)]
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                logits = head.logits(tuple(leaves))
            of_rows = (one[rows, None] for one in per_token)
            grad_logits = _grad_logits(logits.detach(), own[rows], head.vocab_size, *of_rows)
            fresh = torch.autograd.grad(logits, [t for t in leaves if t.requires_grad], grad_logits)
            totals = [
                grad[rows] if k < head.num_inputs else grad
                for k, grad in enumerate(grads)
                if grad is not None
            ]
            for total, part in zip(totals, fresh, strict=True):
                total.add_(part)
        narrow = (None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))
        return (None, None, *narrow)


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


def _own_labels(own: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column in this rank's part ``[n, 1]``, and whether it lies there.

    Without asking the device how many do: that would wait for it, once a chunk.
    """
    is_here = (own >= 0) & (own < num_columns)
    return own.clamp(0, num_columns - 1)[:, None], is_here[:, None]


def _grad_logits(
    logits: torch.Tensor,
    own: torch.Tensor,
    vocab_size: int,
    largest: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor,
    d_lse: torch.Tensor,
    d_mean: torch.Tensor,
) -> torch.Tensor:
    """Gradient of this rank's logits, from those of the token's statistics (``d_...``).

    d log p(label) / dz_v = [v is label] - p_v,   d entropy / dz_v = - p_v (log p_v + entropy),
    d lse / dz_v = p_v,   d mean / dz_v = 1 / V
    """
    log_p = (logits - largest) - log_total  # in this order, no digit is lost to a large logit
    grad = log_p.exp().mul_(d_lse - d_log_probs - d_entropy * (log_p + entropy))
    grad += d_mean / vocab_size
    columns, is_here = _own_labels(own, logits.shape[1])
    return grad.scatter_add_(1, columns, d_log_probs * is_here)


def _partial_statistics(logits: torch.Tensor, own: torch.Tensor, vocab_start: int) -> torch.Tensor:
    """Seven numbers a token from this rank's part: ``[7, n]``.

    max m, sum e^(z-m), sum (z-m) e^(z-m), sum z, sum e^2(z-m), the label's z (-inf if elsewhere),
    and the place of m in the whole vocabulary, exact in float32 up to 2^24 tokens.
    """
    top, place = logits.max(dim=-1)
    below = logits - top[:, None]
    weights = below.exp()
    columns, is_here = _own_labels(own, logits.shape[1])
    label = logits.gather(1, columns).masked_fill(~is_here, -math.inf).squeeze(1)
    return torch.stack(
        [
            top,
            weights.sum(-1),
            (weights * below).sum(-1),
            logits.sum(-1),
            weights.square().sum(-1),
            label,
            (place + vocab_start).to(top.dtype),
        ]
    )


def _gather(partial: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """``[P, 7, N]`` from every rank's ``[7, N]``; one all-gather."""
    if group is None:
        return partial[None]
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, partial.contiguous(), group=group)
    return torch.stack(parts)


def _combine(parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics over the whole vocabulary from those of its parts ``[P, 7, N]``."""
    top, rank = parts[:, 0].max(dim=0)  # of equal maxima the first, as argmax has it
    below = parts[:, 0] - top
    rescale = below.exp()
    total = (parts[:, 1] * rescale).sum(0)
    mean_below = ((parts[:, 2] + below * parts[:, 1]) * rescale).sum(0) / total
    return {
        "top": parts[:, 6].gather(0, rank[None])[0].long(),
        "max": top,
        "log_total": total.log(),
        "entropy": total.log() - mean_below,
        "sum": parts[:, 3].sum(0),
        "log_sum_sq_probs": ((parts[:, 4] * rescale.square()).sum(0) / total.square()).log(),
        "label": parts[:, 5].max(dim=0).values,
    }
