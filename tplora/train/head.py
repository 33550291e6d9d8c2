"""trl's fused head, for a head that is cut over ranks and may carry an adapter.

trl's trainers call ``model(..., labels=..., fused_lm_head=True)`` and read per-token
log-probabilities instead of logits. Its own implementation gathers the whole head weight on every
forward and ignores an adapter on it. This one computes on the shards.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from trl.trainer.utils import FusedCausalLMOutput

from tplora.adapter.linear import TploraLinear
from tplora.collectives import replicate_input
from tplora.plan.style import shard_range
from tplora.train.loss import HeadSettings, LabelStatistics, label_statistics
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
    base = head.get_base_layer() if isinstance(head, TploraLinear) else head
    mesh, vocab_size = tp_mesh(model), base.weight.shape[0]
    is_cut = mesh is not None and local_shard(base.weight).shape[0] != vocab_size
    start = 0
    if mesh is not None and is_cut:
        start, _ = shard_range(vocab_size, mesh.get_local_rank(), mesh.size())
        hidden = replicate_input(hidden, mesh.get_group())
    inputs, parameters, project = _projection(head, base, hidden)
    return label_statistics(
        inputs,
        parameters,
        labels,
        project,
        vocab_start=start,
        vocab_size=vocab_size,
        settings=settings,
        group=_group(mesh) if is_cut else None,
    )


def _group(mesh: DeviceMesh | None) -> Any:
    return None if mesh is None else mesh.get_group()


def _projection(head: Any, base: Any, hidden: torch.Tensor) -> Any:
    """Inputs, parameters and the product of the head, with its adapters if it has any.

    The dropped input is made once, outside, so that computing a chunk again drops the same.
    """
    weight, bias = local_shard(base.weight), base.bias
    frozen = (weight,) if bias is None else (weight, local_shard(bias))
    adapters = head.applied_adapters() if isinstance(head, TploraLinear) else []
    dropped = tuple(head.drop(name, hidden) for name in adapters)
    tensors = {name: head.adapter_tensors(name) for name in adapters}
    factors = tuple(tensor for name in adapters for tensor in tensors[name].values())
    num_inputs, num_frozen = 1 + len(dropped), len(frozen)

    def project(*given: torch.Tensor) -> torch.Tensor:
        rows, rest = given[:num_inputs], given[num_inputs:]
        z = F.linear(rows[0], *rest[:num_frozen])
        dtype, pieces = z.dtype, iter(rest[num_frozen:])
        own_bias = rest[1] if num_frozen > 1 else None
        for name, row in zip(adapters, rows[1:], strict=True):
            own = {what: next(pieces) for what in tensors[name]}
            z = head.apply_adapter(name, z, row, own, bias=own_bias)
        return z.to(dtype)

    return (hidden, *dropped), (*frozen, *factors), project
