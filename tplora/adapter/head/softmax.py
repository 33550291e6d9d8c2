"""Softmax over a vocabulary that is cut: numbers of each part, of the whole, and gradients.

    # n tokens   V vocabulary   P tp_size

    m_k = max z,  s_k = sum e^(z - m_k)  on each part;    m = max m_k,  s = sum s_k e^(m_k - m)
    log p(label) = z[label] - m - log s,    d log p(label) / dz_v = [v is label] - e^(z_v - m) / s

No communication.
"""

from __future__ import annotations

import math

import torch

__all__ = ["combine", "grad_logits", "label_slope", "num_statistics", "partial_statistics"]


def num_statistics(*, is_label_only: bool) -> int:
    """Numbers a token that ``partial_statistics`` gives."""
    return 3 if is_label_only else 7


def partial_statistics(
    logits: torch.Tensor, own: torch.Tensor, vocab_start: int, *, is_label_only: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seven numbers a token from this rank's part ``[n, V/P]``, or three; and ``e^(z-m)``.

    max m, sum e^(z-m), the label's z (-inf if elsewhere); then sum (z-m) e^(z-m), sum z,
    sum e^2(z-m), and the place of m in the whole vocabulary, exact in float32 up to 2^24 tokens.
    """
    columns, is_here = _own_labels(own, logits.shape[1])
    label = logits.gather(1, columns).masked_fill(~is_here, -math.inf).squeeze(1)
    if is_label_only:
        top = logits.amax(dim=-1)
        weights = (logits - top[:, None]).exp_()
        return torch.stack([top, weights.sum(-1), label]), weights
    top, place = logits.max(dim=-1)
    below = logits - top[:, None]
    weights = below.exp()
    numbers = [
        top,
        weights.sum(-1),
        label,
        below.mul_(weights).sum(-1),
        logits.sum(-1),
        torch.mul(weights, weights, out=below).sum(-1),
        (place + vocab_start).to(top.dtype),
    ]
    return torch.stack(numbers), weights


def combine(parts: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics over the whole vocabulary from those of its parts, ``[P, 7, n]`` or ``[P, 3, n]``.

    Of the maximum, total and label of the three, of all else of the seven.
    """
    top, rank = parts[:, 0].max(dim=0)  # of equal maxima the first, as argmax has it
    below = parts[:, 0] - top
    rescale = below.exp()
    total = (parts[:, 1] * rescale).sum(0)
    log_total = total.log()
    label = parts[:, 2].max(dim=0).values
    found = {"max": top, "log_total": log_total, "log_probs": (label - top) - log_total}
    if parts.shape[1] == num_statistics(is_label_only=True):
        return found
    mean_below = ((parts[:, 3] + below * parts[:, 1]) * rescale).sum(0) / total
    return found | {
        "top": parts[:, 6].gather(0, rank[None])[0].long(),
        "entropy": log_total - mean_below,
        "sum": parts[:, 4].sum(0),
        "log_sum_sq_probs": ((parts[:, 5] * rescale.square()).sum(0) / total.square()).log(),
    }


def label_slope(
    weights: torch.Tensor, own_max: torch.Tensor, own: torch.Tensor, whole: dict[str, torch.Tensor]
) -> torch.Tensor:
    """``d log p(label) / dz`` of this rank's part; written into ``weights``, its ``e^(z-m_k)``."""
    share = ((own_max - whole["max"]) - whole["log_total"]).exp()
    columns, is_here = _own_labels(own, weights.shape[1])
    slope = weights.mul_(-share[:, None])
    return slope.scatter_add_(1, columns, is_here.to(slope.dtype))


def grad_logits(
    logits: torch.Tensor,
    own: torch.Tensor,
    vocab_size: int,
    largest: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor | None,
    d_entropy: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    d_mean: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of this rank's logits, from those of the token's statistics (``d_...``; None is 0).

    d log p(label) / dz_v = [v is label] - p_v,   d entropy / dz_v = - p_v (log p_v + entropy),
    d lse / dz_v = p_v,   d mean / dz_v = 1 / V
    """
    log_p = (logits - largest).sub_(log_total)  # in this order, large logits lose no digit
    per_p = torch.zeros_like(largest)
    per_p = per_p if d_lse is None else per_p + d_lse
    per_p = per_p if d_log_probs is None else per_p - d_log_probs
    if d_entropy is None:
        grad = log_p.exp_().mul_(per_p)
    else:
        assert entropy is not None
        grad = log_p.exp().mul_(log_p.add_(entropy).mul_(-d_entropy).add_(per_p))
    if d_mean is not None:
        grad += d_mean / vocab_size
    if d_log_probs is not None:
        columns, is_here = _own_labels(own, logits.shape[1])
        grad.scatter_add_(1, columns, (d_log_probs * is_here).to(grad.dtype))
    return grad


def _own_labels(own: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column in this rank's part ``[n, 1]``, and whether it lies there.

    Without asking the device how many do: that would wait for it, once a chunk.
    """
    is_here = (own >= 0) & (own < num_columns)
    return own.clamp(0, num_columns - 1)[:, None], is_here[:, None]
