"""What trl's trainers lack for a model that is cut over ranks, as small subclasses.

Unmodified trainers train a tplora model right. These add the proofs before and during training,
compute the loss on the head's shards, count evaluation rows once, and stop at the first number that
is not finite.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from trl import DPOTrainer, KTOTrainer, SFTTrainer

from tplora.adapter.head.fused import install_fused_head
from tplora.errors import TrainError
from tplora.plan.packing import joined_rows_problem
from tplora.train.agreement import (
    check_finite,
    check_gradient_norm,
    check_rows,
    check_same_replicas,
    gradient_norms,
)
from tplora.train.answer_counting import CountsAnswersOnce
from tplora.train.best import KeepsBest
from tplora.train.counting import CountsOnce
from tplora.train.local_steps import StepsLocally
from tplora.train.optimizers import create_loraplus_optimizer
from tplora.upstream import TakesTokenizedRows, trl_without_head_check, uploads_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import TrainingArguments

    from tplora.adapter.model import TploraModel

__all__ = ["TploraDPOTrainer", "TploraKTOTrainer", "TploraSFTTrainer", "TrainsCutModel"]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A number of a step that stays on the device until it has to be known."""

    step: int
    number: torch.Tensor
    of_factors: Mapping[str, torch.Tensor] | None = None
    """Of a gradient norm: that of each factor's piece, before clipping."""


class TrainsCutModel(StepsLocally):
    """Put before one of trl's trainers: proofs, the loss on the head's shards, local steps, LoRA+.

    Args:
        model: What ``attach_adapter`` returned.
        check_every_steps: Every how many optimizer steps replicas and batches are compared over
            the ranks; they always are before the first step.
        loraplus_lr_ratio: LoRA+: B's learning rate over A's; every factor has the same when left
            out.
        loraplus_lr_embedding: LoRA+'s learning rate of embeddings' factors.
        kwargs: What it takes; ``args.parallelism_config`` is ``parallelism_config(model)``.
    """

    def __init__(
        self: Any,
        model: TploraModel,
        *,
        check_every_steps: int = 50,
        loraplus_lr_ratio: float | None = None,
        loraplus_lr_embedding: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._loraplus = loraplus_lr_ratio, loraplus_lr_embedding
        base = model.get_base_model()
        _check_loss(kwargs.get("args"))
        _check_joined_rows(kwargs.get("args"), model)
        parent: Any = super()
        with trl_without_head_check(base), _without_smoothing(kwargs.get("args")) as smoothing:
            parent.__init__(model=model, **kwargs)
        if uploads_model(self):
            raise TrainError(
                "WANDB_LOG_MODEL: would save the model on the first rank alone, and wait for the "
                "others for ever; unset it, and upload the adapter's folder afterwards"
            )
        install_fused_head(base, smoothing=smoothing)
        self._check_every_steps = check_every_steps
        self._last_checked_step = -1
        self._step_loss = torch.zeros(())
        self._unread: list[_Unread] = []
        # A loss that is not finite stops the run before it is logged: nothing is to be filtered,
        # and the filter waits for the device at each micro-batch.
        self.args.logging_nan_inf_filter = False

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's, or LoRA+'s over the same one."""
        ratio, lr_embedding = self._loraplus
        if getattr(self, "optimizer", None) is None and ratio is not None:
            self.optimizer: Any = create_loraplus_optimizer(
                self.model, self.args, lr_ratio=ratio, lr_embedding=lr_embedding
            )
        parent: Any = super()
        optimizer: torch.optim.Optimizer = parent.create_optimizer(*args, **kwargs)
        return optimizer

    def training_step(
        self: Any, model: TploraModel, inputs: dict[str, Any], *args: Any
    ) -> torch.Tensor:
        """One micro-batch; first of its step, it is preceded by the proofs when they are due."""
        step: int = self.state.global_step
        is_due = step % self._check_every_steps == 0 or self._last_checked_step < 0
        if is_due and step != self._last_checked_step:
            self._last_checked_step = step
            check_rows(self._prepare_inputs(inputs), self.model, step=step + 1)
            check_same_replicas(self.model, step=step)
        parent: Any = super()
        loss: torch.Tensor = parent.training_step(model, inputs, *args)
        self._step_loss = self._step_loss + loss.detach()
        if self.accelerator.sync_gradients:
            self._unread.append(_Unread(step + 1, self._step_loss))
            self._step_loss = torch.zeros(())
        return loss

    def _clip_grad_norm(self: Any, model: TploraModel) -> Any:
        self._norms_before = gradient_norms(self.model)  # clipping makes all of them alike
        parent: Any = super()
        return parent._clip_grad_norm(model)

    def _get_grad_norm(self: Any, model: TploraModel, grad_norm: Any = None) -> Any:
        before = gradient_norms(self.model) if grad_norm is None else self._norms_before
        parent: Any = super()
        norm = parent._get_grad_norm(model, grad_norm)
        self._unread.append(_Unread(self.state.global_step + 1, norm.detach(), before))
        return norm

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        """The trainer's; nothing is logged or saved after a number that is not finite."""
        control = self.control
        if (
            control.should_log
            or control.should_save
            or control.should_evaluate
            or control.should_training_stop
        ):
            self._check_numbers()
            self.settle_metrics()
        parent: Any = super()
        parent._maybe_log_save_evaluate(*args, **kwargs)

    def _check_numbers(self: Any) -> None:
        """Those of the steps since the last time; the device is waited for here alone.

        Collective over data axes, so that all ranks stop.
        """
        if not self._unread:
            return
        device = self.args.device
        numbers = torch.stack([one.number.double().to(device) for one in self._unread])
        of_ranks = self._gather_ranks(numbers).view(-1, len(numbers)).sum(0).tolist()
        for one, number in zip(self._unread, of_ranks, strict=True):
            if one.of_factors is None:
                check_finite(number, what="the loss", step=one.step)
            else:
                check_gradient_norm(number, one.of_factors, self.model, step=one.step)
        self._unread.clear()


class TploraSFTTrainer(TrainsCutModel, KeepsBest, CountsOnce, SFTTrainer):  # type: ignore[misc]
    """Trl's supervised fine-tuning, over a tplora model. Its checkpoints resume at any tp_size.

    Takes what ``TrainsCutModel`` and SFTTrainer take.
    """


class TploraDPOTrainer(
    TrainsCutModel,
    KeepsBest,
    CountsAnswersOnce,
    TakesTokenizedRows,
    DPOTrainer,  # type: ignore[misc]
):
    """Trl's preference optimization, over a tplora model. Its checkpoints resume at any tp_size.

    The reference is the adapter as it is when the trainer is built, which trl copies into the
    frozen adapter "ref": the base, for an adapter that is new. Takes what ``TrainsCutModel`` and
    DPOTrainer take; ``args.loss_type`` is one that looks at each pair alone, over data axes.
    """


class TploraKTOTrainer(
    TrainsCutModel,
    KeepsBest,
    CountsAnswersOnce,
    TakesTokenizedRows,
    KTOTrainer,  # type: ignore[misc]
):
    """Trl's training on single rated answers, over a tplora model; see ``TploraDPOTrainer``."""


def _check_loss(args: TrainingArguments | None) -> None:
    """Refuse what would take another loss than the head's shards give."""
    if args is None:
        return
    if args.use_liger_kernel:
        raise TrainError(
            "use_liger_kernel = true: replaces the code of layers that are cut over ranks; set it "
            "to false: the loss holds no whole logits without it"
        )
    loss_type = getattr(args, "loss_type", "nll")
    if args.label_smoothing_factor and loss_type != "nll":
        raise TrainError(
            f"label_smoothing_factor = {args.label_smoothing_factor:g}: trl smooths no loss but "
            f'"nll", and loss_type is {loss_type!r}; leave one of them out'
        )


def _check_joined_rows(args: TrainingArguments | None, model: TploraModel) -> None:
    """Refuse joined rows where they would read each other."""
    asked = [key for key in ("packing", "padding_free") if getattr(args, key, False)]
    if not asked:
        return
    config = model.get_base_model().config
    lora = model.peft_config["default"]
    problem = joined_rows_problem(config, lora, config._attn_implementation)
    if getattr(args, "packing_strategy", "bfd") == "wrapped":
        problem = 'packing_strategy = "wrapped" has each row read those before it; use "bfd"'
    if problem:
        raise TrainError(f"{asked[0]} = true: {problem}; set it to false")


@contextlib.contextmanager
def _without_smoothing(args: TrainingArguments | None) -> Iterator[float]:
    """While open, trl is not asked to smooth labels, for which it runs the model twice.

    Yields what it was asked for; the fused head does it.
    """
    asked: float = 0.0 if args is None else args.label_smoothing_factor
    if not asked:
        yield 0.0
        return
    assert args is not None
    args.label_smoothing_factor = 0.0
    try:
        yield asked
    finally:
        args.label_smoothing_factor = asked
