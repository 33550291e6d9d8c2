"""A trainer's own checkpoints, made whole under tensor parallelism: resumable at any tp_size.

    factors, optimizer state: gathered, one tensor at a time -> the writer -> a folder, at once
    a folder -> every rank takes its pieces of what is whole; nothing is sent

The files are transformers' own with full tensors in them, so a plain Trainer in one process resumes
them, and this resumes a plain one's. What a plain one lacks lies in ``trainer_state.json``, where
states of callbacks lie: how many forwards have drawn dropout masks, and what was measured since the
last logged step.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tplora.adapter.load import load_factors
from tplora.adapter.save import raise_everywhere
from tplora.errors import ArtifactError, TrainError
from tplora.mesh import tell_all
from tplora.train.checkpoint_files import (
    OPTIMIZER,
    RNG,
    SCHEDULER,
    check_checkpoint,
    check_same_adapter,
    find_last_checkpoint,
    load_plain_file,
)
from tplora.train.checkpoint_saving import OURS, SavesWhileTraining
from tplora.train.optimizer_state import (
    cut_optimizer_state,
)
from tplora.upstream import (
    load_rng_file,
    trainer_that_resumes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import TrainingArguments


__all__ = ["ResumesAtAnySize", "last_checkpoint"]


def last_checkpoint(folder: Path, *, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """The last whole checkpoint in ``folder``, on every rank. Collective: the first rank looks."""
    found: Path | None = _on_first_rank(lambda: find_last_checkpoint(folder, say=say))
    return found


class ResumesAtAnySize(SavesWhileTraining):
    """Put before any ``Trainer`` whose model is a ``TploraModel``.

    Raises:
        TrainError: If the arguments ask for what is not done with these checkpoints.
    """

    _resumed: dict[str, Any] | None = None
    """Our part of the checkpoint's state, until training begins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_arguments(kwargs.get("args"))
        with trainer_that_resumes(kwargs.get("args")):
            super().__init__(*args, **kwargs)

    def last_checkpoint(self: Any, say: Callable[[str], None] = lambda line: None) -> Path | None:
        """The last whole checkpoint of the output folder. Collective: the first rank looks."""
        return last_checkpoint(Path(self.args.output_dir), say=say)

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The trainer's; True resumes the last checkpoint that is whole.

        Raises:
            ArtifactError: If the checkpoint is damaged, of another adapter, or not there.
        """
        if resume_from_checkpoint is True:
            found = self.last_checkpoint()
            if found is None:
                raise ArtifactError(
                    f"{self.args.output_dir}: has no checkpoint to resume; train without resuming"
                )
            resume_from_checkpoint = str(found)
        parent: Any = super()
        try:
            return parent.train(resume_from_checkpoint or None, *args, **kwargs)
        except BaseException as error:
            problem = self._writer.wait()  # the last good checkpoint is worth the wait
            if problem:
                error.add_note(problem)
            raise

    # ---- resuming

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Fill the factors; the first rank has read all of the folder before. Collective."""
        folder = Path(resume_from_checkpoint)
        _on_first_rank(lambda: check_checkpoint(folder))
        for adapter, config in self.model.peft_config.items():
            place = folder if adapter == "default" else folder / adapter
            check_same_adapter(place, config)
            load_factors(self.model, place, adapter_name=adapter)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        self._take_progress(folder)
        state = cut_optimizer_state(
            load_plain_file(folder / OPTIMIZER),
            self.optimizer,
            self._all_factors(),
            where=str(folder / OPTIMIZER),
        )
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(load_plain_file(folder / SCHEDULER))

    def _take_progress(self: Any, folder: Path) -> None:
        step, last = self.state.global_step, self.state.max_steps
        if step > last:
            raise TrainError(
                f"{folder}: is of step {step}, past the end of this run, step {last}; resume an "
                "earlier checkpoint, or train for longer"
            )
        # The trainer keeps the checkpoint's, and only warns that they are not the arguments'.
        self.state.compute_steps(self.args, last)
        ours = self.state.stateful_callbacks.get(OURS, {})
        self._check_rows_per_step(folder, ours.get("rows_per_step"))
        guessed = step * self.args.gradient_accumulation_steps  # a plain trainer counts none
        self.model.forward_seed.num_forwards = ours.get("num_forwards", guessed)
        self._total_train_tokens = ours.get("num_tokens", 0)
        self._resumed = ours

    def _check_rows_per_step(self: Any, folder: Path, was: int | None) -> None:
        """A step is a place among the rows, which is another one if steps have other rows."""
        now = self.get_total_train_batch_size(self.args)
        if was not in (None, now):
            raise TrainError(
                f"{folder}: its steps have {was} rows, this run's have {now}: it would go on at "
                "other rows; keep data ranks x per_device_train_batch_size x "
                f"gradient_accumulation_steps at {was}"
            )

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        """The same states on every rank: they order the rows, which each rank then takes its of.

        What differs between data ranks, dropout, is drawn from the seed, the number of the forward
        and the rank.
        """
        if checkpoint is None:
            return
        states = load_rng_file(Path(checkpoint) / RNG)
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.random.set_rng_state(states["cpu"])
        if torch.cuda.is_available() and "cuda" in states:
            found = states["cuda"]
            torch.cuda.set_rng_state(found[0] if isinstance(found, list) else found)

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, which would add a step to a checkpoint of the last one.

        What was measured since the last logged step is put back here: the trainer has just set it
        to zero.
        """
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        if self._resumed:
            self._tr_loss += self._resumed["loss_since"]
            self._globalstep_last_logged = self._resumed["last_logged"]
            for key, found in self._resumed["measured_since"].items():
                self._metrics["train"][key] = found
            self._resumed = None
        parent: Any = super()
        return parent._run_epoch(*args, **kwargs)


def _check_arguments(args: TrainingArguments | None) -> None:
    for name in ("push_to_hub", "load_best_model_at_end"):
        if getattr(args, name, False):
            raise TrainError(
                f"train.{name} = true: is not done with checkpoints of a model that is cut; set it "
                "to false, and take the checkpoint's folder afterwards"
            )


def _on_first_rank(look: Callable[[], Any]) -> Any:
    """What the first rank finds, on every rank; its error, too. Collective."""
    found, problem = None, ""
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            found = look()
        except ArtifactError as error:
            problem = str(error)
    raise_everywhere(problem)
    return tell_all(found)
