"""trl's fused head, for a head that is cut over ranks and may be trained or carry an adapter.

trl's trainers call ``model(..., labels=..., fused_lm_head=True)`` and read per-token
log-probabilities instead of logits. Its own implementation gathers the whole head weight on every
forward, ignores an adapter on it, and knows of what models do to their logits those whose config
has a name for it. This one runs the model's own code, with a head that defers its logits.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch

from tplora.adapter.head.reading import token_statistics
from tplora.upstream import trl_fused_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tplora.upstream.trainers import TrlFusedHead

__all__ = ["install_fused_head"]

_STATISTICS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def install_fused_head(model: PreTrainedModel, *, smoothing: float = 0.0) -> None:
    """Replace the fused branch that trl installed on ``model.forward``; the rest stays trl's.

    Args:
        model: The base model, after a trl trainer was built around it; else nothing happens.
        smoothing: The share of each label that goes to all tokens alike. ``log_probs`` are then
            those of what a token is to be, ``(1 - s) log p(label) + s mean over v of log p_v``.
    """
    found = trl_fused_head(model)
    if found is None:
        return

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def forward(
        self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any
    ) -> Any:
        if not fused_lm_head or found.casts_head:
            return found.forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        return _fused_forward(self, found, smoothing, *args, **kwargs)

    model.forward = types.MethodType(forward, model)


def _fused_forward(
    model: PreTrainedModel,
    head: TrlFusedHead,
    smoothing: float,
    *args: Any,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs: Any,
) -> Any:
    kwargs["use_cache"] = False
    outputs = head.own_forward(*args, **kwargs)
    logits: torch.Tensor = outputs.logits
    if shift_labels is None:
        assert labels is not None
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    mask = shift_labels != -100
    stats = token_statistics(logits[mask] / head.temperature, shift_labels[mask])
    fields = {
        name: _scatter(getattr(stats, name), mask) if name in head.outputs else None
        for name in _STATISTICS
    }
    aims = stats.log_probs
    if smoothing:
        aims = torch.lerp(aims, stats.mean_logits - stats.lse, smoothing)
    log_probs = fields["log_probs"] = _scatter(aims, mask)
    num_items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss, router_loss = -log_probs.sum() / num_items, getattr(outputs, "aux_loss", None)
    if router_loss is not None:
        loss = loss + _router_weight(model) * router_loss
    return head.output_class(loss=loss, label_mask=mask, aux_loss=router_loss, **fields)


def _router_weight(model: PreTrainedModel) -> float:
    weight: float = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
    return weight


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` where ``mask`` is true, zero elsewhere; connected to the graph even when empty."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
