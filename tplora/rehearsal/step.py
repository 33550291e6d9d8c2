"""A training step of rank 0 on the meta device: the real code, without weights and without peers.

    the model as it is cut -> factors -> trl's forward with labels -> backward -> bucket

Nothing is estimated: each tensor that the step makes is followed from birth to death, and each
collective noted, as the code that will train runs. So activations of every architecture come out
by one rule. Not seen is what an operator takes and gives back inside itself; values are not there
(``plan/values.py``), so that every token has a label, and where rows are padded they are padded.
"""

from __future__ import annotations

import copy
import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tplora.adapter.attach import attach_adapter
from tplora.adapter.head.fused import install_fused_head
from tplora.base.mends import mend_loaded, mended_while_loading
from tplora.errors import PlanError
from tplora.plan.step_cost import StepCost, Traffic, resident_bytes
from tplora.plan.values import AsIfAllHeld
from tplora.rehearsal.live_bytes import LiveBytes
from tplora.rehearsal.recorded import Recorded
from tplora.rehearsal.unpacked import unpack_for_each_product
from tplora.upstream import tp_mesh
from tplora.upstream.rehearsal import (
    attention_without_storage,
    build_cut_meta_model,
    end_of_step,
    ranks_without_peers,
)

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig, PreTrainedModel

    from tplora.adapter.model import TploraModel
    from tplora.plan.build import Plan
    from tplora.plan.step_cost import Batch

__all__ = ["rehearse"]

# What SFTTrainer asks of its head (trl 1.16).
_OUTPUTS = ("log_probs", "entropy", "is_top1")
_REFERENCE = "ref"
"""What trl calls the frozen copy of an adapter that preferences are learned against."""


def rehearse(
    plan: Plan,
    config: PretrainedConfig,
    lora: LoraConfig,
    batch: Batch,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> StepCost:
    """What a step of ``plan`` takes on rank 0 and says on the tp group.

    Joins and leaves a process group of its own: this process must not be in one.

    Args:
        plan: Of the model and its adapter.
        config: The model's transformers config, with as many tokens as it is going to have.
        lora: PEFT's config, that of the plan.
        batch: How many rows of which length, and what is kept of them.
        attn_implementation: As in ``from_pretrained``.
        trust_remote_code: Whether the architecture may come from the model's own code.

    Raises:
        PlanError: If the model's code does something that cannot be done without values, or this
            process is in a group.
    """
    if plan.tp_size > 1 and dist.is_initialized():
        raise PlanError(["a step cannot be run through inside a process group; leave it before"])
    config = copy.deepcopy(config)
    if attn_implementation is not None:
        config._attn_implementation = attn_implementation
    try:
        with ranks_without_peers(plan.tp_size), attention_without_storage():
            model = _build(plan, config, lora, trust_remote_code=trust_remote_code)
            if batch.reference_passes:
                model.add_adapter(_REFERENCE, _drawn_anywhere(lora))
            found: dict[str, Any] = _Rehearsal(model, batch).run()
    except PlanError:
        raise
    except Exception as error:  # whatever a model's own code does
        raise PlanError(
            [
                f"{plan.class_name}: its step cannot be followed without values "
                f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
            ]
        ) from error
    resident = resident_bytes(plan, has_reference=batch.reference_passes > 0)
    return StepCost(batch=batch, **(resident | found))


def _build(
    plan: Plan, config: PretrainedConfig, lora: LoraConfig, *, trust_remote_code: bool
) -> TploraModel:
    with mended_while_loading(config, plan.tp_size) as styles:
        base = build_cut_meta_model(
            config,
            tp_size=plan.tp_size,
            dtype=getattr(torch, plan.base_dtype),
            styles=styles,
            trust_remote_code=trust_remote_code,
        )
    mesh = tp_mesh(base)
    if mesh is not None:
        mend_loaded(base, mesh.get_group())
    base.requires_grad_(requires_grad=False)
    model = attach_adapter(base, _drawn_anywhere(lora), plan=plan)
    if plan.quantization is not None:
        unpack_for_each_product(model, plan.quantization)
    add_fused_lm_head(base, outputs=_OUTPUTS)
    install_fused_head(base)
    model.train()
    return model


def _drawn_anywhere(lora: LoraConfig) -> LoraConfig:
    """The config with factors that are drawn: those computed from W take as much."""
    lora = copy.deepcopy(lora)
    if isinstance(lora.init_lora_weights, str):
        lora.init_lora_weights = True
    return lora


class _Rehearsal:
    """One step, followed.

    Args:
        model: On the meta device, ready to train.
        batch: The work.
    """

    def __init__(self, model: TploraModel, batch: Batch) -> None:
        self._model, self._batch = model, batch
        self._live = LiveBytes()
        self._kept = 0
        self._is_learning = True
        base: PreTrainedModel = model.get_base_model()
        base.base_model.register_forward_hook(self._note_kept)
        if batch.is_checkpointed:
            keywords = dict(batch.checkpointing)
            every = keywords.pop("every_n_layers", 1)
            model.activation_checkpointing_enable(keywords, every_n_layers=every)
            model.enable_input_require_grads()  # as SFTTrainer does

    def run(self) -> dict[str, Any]:
        """The numbers of ``StepCost`` that a plan does not say."""
        with ExitStack() as stack:
            stack.enter_context(AsIfAllHeld())  # type: ignore[no-untyped-call]
            self._said = stack.enter_context(Recorded())
            stack.enter_context(self._live)
            if self._batch.is_accumulated:
                with end_of_step(is_last=False):
                    self._forward().backward()  # type: ignore[no-untyped-call]
                self._live.peak = self._live.live
                self._said.calls.clear()
            first = self._live.live
            self._forward_only(self._batch.passes_before)
            before = self._live.peak
            loss = self._forward()
            loss_bytes = self._live.peak - self._kept
            if self._batch.reference_passes:
                with use_adapter(self._model, _REFERENCE):
                    self._forward_only(self._batch.reference_passes)
            forward, top = list(self._said.calls), max(before, self._live.peak)
            self._said.calls.clear()
            with end_of_step(is_last=True):
                loss.backward()  # type: ignore[no-untyped-call]
            calls, num_buckets = self._said.calls, self._num_buckets()
            del loss
        gc.collect()
        split = len(calls) - num_buckets
        return {
            "kept": self._kept - first,
            "loss": loss_bytes,
            "working": max(top, self._live.peak),
            "forward": Traffic.of(forward),
            "backward": Traffic.of(calls[:split]),
            "bucket": Traffic.of(calls[split:]),
        }

    def _forward(self) -> torch.Tensor:
        rows, length = self._batch.rows, self._batch.length
        shape = (1, rows * length) if self._batch.is_joined else (rows, length)
        ids = torch.zeros(shape, dtype=torch.long, device="meta")
        # What tells rows apart: positions, where they are joined; a mask, where they are padded.
        name = "position_ids" if self._batch.is_joined else "attention_mask"
        given = {"input_ids": ids, "labels": ids.clone(), name: torch.ones_like(ids)}
        loss: torch.Tensor = self._model(**given, fused_lm_head=True).loss
        return loss

    def _forward_only(self, num_passes: int) -> None:
        """Passes that nothing is learned from."""
        self._is_learning = False
        with torch.no_grad():
            for _ in range(num_passes):
                self._forward()
        self._is_learning = True

    def _note_kept(self, *_: Any) -> None:
        if self._is_learning:
            self._kept = self._live.peak = self._live.live

    def _num_buckets(self) -> int:
        return 0 if self._model.sync is None else self._model.sync.num_buckets
