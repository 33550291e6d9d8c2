"""trl's fused head, for a head that is cut over ranks and may be trained or carry an adapter.

trl's trainers call ``model(..., labels=..., fused_lm_head=True)`` and read per-token
log-probabilities instead of logits. Its own implementation gathers the whole head weight on every
forward and ignores an adapter on it. This one computes on the shards.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from trl.trainer.utils import FusedCausalLMOutput

from tplora.collectives import replicate_input
from tplora.plan.style import shard_range
from tplora.train.loss import HeadSettings, LabelStatistics, label_statistics
from tplora.train.projection import Projection, head_module
from tplora.upstream import local_shard, tp_mesh, trl_fused_head_settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

__all__ = ["install_fused_head"]


def install_fused_head(model: PreTrainedModel) -> None:
    """Replace the fused branch that trl installed on ``model.forward``; the rest stays trl's.

    Args:
        model: The base model, after a trl trainer was built around it.
    """
    trl_forward = model.forward
    found = trl_fused_head_settings(trl_forward)
    if found is None:
        return
    settings = HeadSettings(
        temperature=found["temperature"],
        softcap=found["final_logit_softcapping"],
        scale=found["logit_scale"],
    )
    outputs: tuple[str, ...] = found["outputs"]
    _name_backbone(model)

    @functools.wraps(type(model).forward)  # `generate` checks its arguments against the signature
    def forward(
        self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any
    ) -> Any:
        if not fused_lm_head or found["cast_lm_head_to_fp32"] or _wants_router_logits(self, kwargs):
            return trl_forward(*args, fused_lm_head=fused_lm_head, **kwargs)
        return _fused_forward(self, settings, outputs, *args, **kwargs)

    model.forward = types.MethodType(forward, model)


def _name_backbone(model: PreTrainedModel) -> None:
    """Make ``model.base_model``, which runs before the head, the part without the head.

    Llama4ForCausalLM (transformers 5.24) is named in it as a part of the class with towers, so that
    it finds itself, and neither trl's head nor this one would ever see a hidden state.
    """
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"


def _wants_router_logits(model: PreTrainedModel, kwargs: dict[str, Any]) -> bool:
    default = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(kwargs.get("output_router_logits", default))


def _fused_forward(
    model: PreTrainedModel,
    settings: HeadSettings,
    outputs: tuple[str, ...],
    *args: Any,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    **kwargs: Any,
) -> FusedCausalLMOutput:
    kwargs["use_cache"] = False
    hidden = model.base_model(*args, **kwargs).last_hidden_state
    if shift_labels is None:
        assert labels is not None
        hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
    mask = shift_labels != -100
    stats = _head_statistics(model, hidden[mask], shift_labels[mask], settings)
    fields = {
        name: _scatter(getattr(stats, name), mask) if name in outputs else None
        for name in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    }
    log_probs = fields["log_probs"] = _scatter(stats.log_probs, mask)
    num_items = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return FusedCausalLMOutput(loss=-log_probs.sum() / num_items, label_mask=mask, **fields)


def _scatter(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` where ``mask`` is true, zero elsewhere; connected to the graph even when empty."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def _head_statistics(
    model: PreTrainedModel, hidden: torch.Tensor, labels: torch.Tensor, settings: HeadSettings
) -> LabelStatistics:
    head = model.get_output_embeddings()
    weight = head_module(head).weight
    assert isinstance(weight, torch.Tensor)
    mesh, vocab_size = tp_mesh(model), weight.shape[0]
    is_cut = mesh is not None and local_shard(weight).shape[0] != vocab_size
    start = 0
    if mesh is not None and is_cut:
        start, _ = shard_range(vocab_size, mesh.get_local_rank(), mesh.size())
        hidden = replicate_input(hidden, mesh.get_group())
    project = Projection.of(head, hidden)
    return label_statistics(
        project.inputs,
        project.parameters,
        labels,
        project,
        vocab_start=start,
        vocab_size=vocab_size,
        settings=settings,
        group=_group(mesh) if is_cut else None,
    )


def _group(mesh: DeviceMesh | None) -> Any:
    return None if mesh is None else mesh.get_group()
