"""What trl's SFTTrainer lacks for a model that is cut over ranks, as a small subclass.

An unmodified SFTTrainer trains a tplora model right. This one adds the proofs before and during
training, computes the loss on the head's shards, counts evaluation rows once, and stops at the
first number that is not finite.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from trl import SFTTrainer

from tplora.adapter.head.fused import install_fused_head
from tplora.errors import TrainError
from tplora.train.agreement import check_finite, check_rows, check_same_replicas
from tplora.train.checkpoint import ResumesAtAnySize
from tplora.train.counting import CountsOnce
from tplora.train.local_steps import StepsLocally
from tplora.train.optimizers import create_loraplus_optimizer
from tplora.upstream import trl_without_head_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trl import SFTConfig

    from tplora.adapter.model import TploraModel

__all__ = ["TploraSFTTrainer"]


class TploraSFTTrainer(ResumesAtAnySize, CountsOnce, StepsLocally, SFTTrainer):  # type: ignore[misc]
    """Trl's supervised fine-tuning, over a tplora model. Its checkpoints resume at any tp_size.

    Args:
        model: What ``attach_adapter`` returned.
        check_every_steps: Every how many optimizer steps replicas and batches are compared over
            the ranks; they always are before the first step.
        loraplus_lr_ratio: LoRA+: B's learning rate over A's; every factor has the same when left
            out.
        loraplus_lr_embedding: LoRA+'s learning rate of embeddings' factors.
        kwargs: What SFTTrainer takes; ``args.parallelism_config`` is ``parallelism_config(model)``.
    """

    def __init__(
        self,
        model: TploraModel,
        *,
        check_every_steps: int = 50,
        loraplus_lr_ratio: float | None = None,
        loraplus_lr_embedding: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._loraplus = loraplus_lr_ratio, loraplus_lr_embedding
        _check_loss(kwargs.get("args"))
        base = model.get_base_model()
        with trl_without_head_check(base), _without_smoothing(kwargs.get("args")) as smoothing:
            super().__init__(model=model, **kwargs)
        install_fused_head(base, smoothing=smoothing)
        self._check_every_steps = check_every_steps
        self._last_checked_step = -1
        self._step_loss = torch.zeros(())
        self._unread: list[tuple[int, str, torch.Tensor]] = []
        # A loss that is not finite stops the run before it is logged: nothing is to be filtered,
        # and the filter waits for the device at each micro-batch.
        self.args.logging_nan_inf_filter = False

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's, or LoRA+'s over the same one."""
        ratio, lr_embedding = self._loraplus
        if getattr(self, "optimizer", None) is None and ratio is not None:
            self.optimizer: Any = create_loraplus_optimizer(
                self.model, self.args, lr_ratio=ratio, lr_embedding=lr_embedding
            )
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        return optimizer

    def training_step(self, model: TploraModel, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        """One micro-batch; first of its step, it is preceded by the proofs when they are due."""
        step: int = self.state.global_step
        is_due = step % self._check_every_steps == 0 or self._last_checked_step < 0
        if is_due and step != self._last_checked_step:
            self._last_checked_step = step
            check_rows(self._prepare_inputs(inputs), self.model, step=step + 1)
            check_same_replicas(self.model, step=step)
        loss: torch.Tensor = super().training_step(model, inputs, *args)
        self._step_loss = self._step_loss + loss.detach()
        if self.accelerator.sync_gradients:
            self._unread.append((step + 1, "the loss", self._step_loss))
            self._step_loss = torch.zeros(())
        return loss

    def _get_grad_norm(self, model: TploraModel, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm)
        self._unread.append((self.state.global_step + 1, "the gradient norm", norm.detach()))
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
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
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _check_numbers(self) -> None:
        """Those of the steps since the last time; the device is waited for here alone.

        Collective over data axes, so that all ranks stop.
        """
        if not self._unread:
            return
        device = self.args.device
        numbers = torch.stack([number.double().to(device) for *_, number in self._unread])
        of_ranks = self._gather_ranks(numbers).view(-1, len(numbers)).sum(0).tolist()
        for (step, what, _), number in zip(self._unread, of_ranks, strict=True):
            check_finite(number, what=what, step=step)
        self._unread.clear()


def _check_loss(args: SFTConfig | None) -> None:
    """Refuse what would take another loss than the head's shards give."""
    if args is None:
        return
    if args.use_liger_kernel:
        raise TrainError(
            "use_liger_kernel = true: replaces the code of layers that are cut over ranks; set it "
            "to false: the loss holds no whole logits without it"
        )
    if args.label_smoothing_factor and args.loss_type != "nll":
        raise TrainError(
            f"label_smoothing_factor = {args.label_smoothing_factor:g}: trl smooths no loss but "
            f'"nll", and loss_type is "{args.loss_type}"; leave one of them out'
        )


@contextlib.contextmanager
def _without_smoothing(args: SFTConfig | None) -> Iterator[float]:
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
