"""What trl's SFTTrainer lacks for a model that is cut over ranks, as a small subclass.

An unmodified SFTTrainer trains a tplora model right. This one adds the proofs before and during
training, computes the loss on the head's shards, counts evaluation rows once, and stops at the
first number that is not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from trl import SFTTrainer

from tplora.train.agreement import (
    check_finite,
    check_gradient_norm,
    check_rows,
    check_same_replicas,
    gradient_norms,
)
from tplora.train.checkpoint import ResumesAtAnySize
from tplora.train.counting import CountsOnce
from tplora.train.head import install_fused_head
from tplora.train.optimizers import create_loraplus_optimizer
from tplora.upstream import trl_without_head_check

if TYPE_CHECKING:
    from tplora.adapter.model import TploraModel

__all__ = ["TploraSFTTrainer"]


class TploraSFTTrainer(ResumesAtAnySize, CountsOnce, SFTTrainer):  # type: ignore[misc]
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
        with trl_without_head_check(model.get_base_model()):
            super().__init__(model=model, **kwargs)
        install_fused_head(model.get_base_model())
        self._check_every_steps = check_every_steps
        self._last_checked_step = -1
        self._step_loss = torch.zeros(())

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
        self._step_loss = self._step_loss + loss.detach()  # no wait for the device until it steps
        if self.accelerator.sync_gradients:
            of_ranks = self._gather_ranks(self._step_loss)
            check_finite(float(of_ranks.sum()), what="the loss", step=step + 1)
            self._step_loss = torch.zeros(())
        return loss

    def _clip_grad_norm(self, model: TploraModel) -> Any:
        before = gradient_norms(self.model)
        norm = super()._clip_grad_norm(model)
        step = self.state.global_step + 1
        check_gradient_norm(float(norm), before, self.model, step=step)
        return norm
