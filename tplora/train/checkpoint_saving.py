"""A trainer's own checkpoints, with full tensors in them, written while it trains on.

factors, optimizer state: gathered, one tensor at a time -> the writer -> a folder, at once
"""

from __future__ import annotations

import random
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback

from tplora.adapter.save import check_factors, gather_factors, raise_everywhere, write_adapter
from tplora.errors import ArtifactError
from tplora.files import written_aside
from tplora.mesh import tell_all
from tplora.train.background import BackgroundWriter
from tplora.train.checkpoint_files import OPTIMIZER, RNG, SCHEDULER, STATE
from tplora.train.optimizer_state import check_finite_state, gather_optimizer_state
from tplora.upstream import note_callback_states, remove_old_checkpoints

if TYPE_CHECKING:
    from tplora.adapter.factor import Factor

__all__ = ["OURS", "SavesWhileTraining"]

OURS = "tplora"
"""The name under which our part of the state lies."""


class SavesWhileTraining:
    """The half of ``ResumesAtAnySize`` that writes."""

    _is_writing = False
    """Whether the last checkpoint may be unfinished, on every rank alike."""
    _judged_step = 0
    """The step of which it was last asked what is to be logged, evaluated and saved."""
    _is_save_put_off = False
    """Whether that step is the last of its epoch, and its checkpoint waits for the epoch's end."""
    _saved_tokenizer: Any = None
    """The writing thread's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._writer = BackgroundWriter()
        super().__init__(*args, **kwargs)

    def _all_factors(self: Any) -> list[Factor]:
        return [
            factor
            for adapter in self.model.peft_config
            for factor in self.model.factors(adapter).values()
        ]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        """Write ``checkpoint-STEP``, whole or not at all. Collective.

        What is gathered is written while training goes on, unless a callback waits for it; the next
        checkpoint and the end of training wait for the last one.

        Raises:
            ArtifactError: On every rank, if a number is not finite, or if this checkpoint, or the
                one before, cannot be written.
        """
        run = Path(self._get_output_dir(trial=trial))
        target = run / f"checkpoint-{self.state.global_step}"
        self._end_last_write()
        self.store_flos()
        is_writer = self.is_world_process_zero()
        factors = gather_factors(self.model, is_writer=is_writer)
        state = {}
        if not self.args.save_only_model:
            state = gather_optimizer_state(self.optimizer, self._all_factors(), is_writer=is_writer)
        self._note_best(run, target)
        progress = self._progress()
        problem = ""
        if is_writer:
            problem = self._begin_to_write(target, factors, state, progress)
        raise_everywhere(problem)
        self._is_writing = True

    def _begin_to_write(
        self: Any, target: Path, factors: Any, state: Any, progress: dict[str, Any]
    ) -> str:
        """The writer's part, up to where it needs nothing of the training any more."""
        try:
            check_factors(self.model, factors)
            if state:
                check_finite_state(state, self._all_factors(), self.optimizer)
            files = self._snapshot(bool(state), progress)
        except Exception as error:  # whatever it is, the other ranks wait to be told
            return f"{target}: {error}"

        def write() -> None:
            try:
                with written_aside(target, overwrite=True) as aside:
                    self._write_checkpoint(aside, factors, state, files)
                remove_old_checkpoints(self, target.parent)
            except Exception as error:
                problem = f"{target}: {error}".replace(f"{target}: {target}", str(target))
                raise ArtifactError(problem) from error

        self._writer.start(write)
        problem: str = self._writer.wait() if self._is_watched() else ""
        return problem

    def _is_watched(self: Any) -> bool:
        """Whether a callback wants to find the checkpoint when it hears of it."""
        return any(
            type(callback).on_save is not TrainerCallback.on_save
            and getattr(callback, "reads_checkpoints", True)
            for callback in self.callback_handler.callbacks
        )

    def _end_last_write(self: Any) -> None:
        """Wait until the last checkpoint is there. Collective, and patient.

        Raises:
            ArtifactError: On every rank, if it could not be written.
        """
        self._is_writing = False
        raise_everywhere(self._writer.wait())

    def _maybe_log_save_evaluate(self: Any, *args: Any, **kwargs: Any) -> None:
        """The trainer's; where it logs, it hears first whether a write has failed."""
        self._put_off_save()
        if self._is_writing and self.control.should_log:
            found = tell_all(self._writer.look())
            self._is_writing = found is None
            if found:
                raise ArtifactError(found)
        parent: Any = super()
        parent._maybe_log_save_evaluate(*args, **kwargs)

    def _put_off_save(self: Any) -> None:
        """Save the last step of an epoch once the epoch's end is done, and what it evaluates.

        A run that goes on from the checkpoint begins after that, and would not make up for it. The
        trainer comes here after each step, and once more when an epoch ends.
        """
        is_step = self.state.global_step != self._judged_step
        self._judged_step = self.state.global_step
        control, epoch = self.control, self.state.epoch or 0.0
        if is_step:
            is_last = control.should_training_stop or epoch == int(epoch)
            self._is_save_put_off = control.should_save and is_last
            control.should_save = control.should_save and not is_last
        elif self._is_save_put_off:
            control.should_save, self._is_save_put_off = True, False

    def _finalize_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's, which looks through the checkpoints."""
        self._end_last_write()
        if self.is_world_process_zero():  # a run that was killed may have left one more
            remove_old_checkpoints(self, Path(self.args.output_dir))
        parent: Any = super()
        return parent._finalize_training(*args, **kwargs)

    def _note_best(self: Any, run: Path, target: Path) -> None:
        if self.state.best_global_step:
            best = run / f"checkpoint-{self.state.best_global_step}"
            if best == target or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _snapshot(self: Any, is_whole: bool, progress: dict[str, Any]) -> dict[str, Any]:
        """What goes into the small files, as it is now; training goes on while it is written."""
        note_callback_states(self)
        self.state.stateful_callbacks[OURS] = progress
        if self._saved_tokenizer is None:
            self._saved_tokenizer = deepcopy(self.processing_class)
        files = {STATE: deepcopy(self.state)}
        if is_whole:
            files |= {SCHEDULER: deepcopy(self.lr_scheduler.state_dict()), RNG: _rng_states()}
        return files

    def _write_checkpoint(
        self: Any, folder: Path, factors: Any, state: Any, files: dict[str, Any]
    ) -> None:
        """One rank, no communication, in a thread of its own."""
        write_adapter(self.model, folder, factors, as_trained=True)
        if self._saved_tokenizer is not None:
            self._saved_tokenizer.save_pretrained(folder)
        if state:
            torch.save(state, folder / OPTIMIZER)
            torch.save(files[SCHEDULER], folder / SCHEDULER)
            torch.save(files[RNG], folder / RNG)
            self._save_scaler(str(folder))
        files[STATE].save_to_json(str(folder / STATE))

    def _progress(self: Any) -> dict[str, Any]:
        """What a plain trainer forgets: it would draw masks, count and average from here anew.

        Collective over data axes, whose ranks have seen other rows: the loss is their mean.
        """
        measured = getattr(self, "_metrics", {}).get("train", {})
        loss, data = torch.as_tensor(self._tr_loss), self.model.data
        return {
            "num_forwards": self.model.forward_seed.num_forwards,
            "num_tokens": int(getattr(self, "_total_train_tokens", 0)),
            "last_logged": self._globalstep_last_logged,
            "loss_since": float(loss if data is None else data.gather(loss).mean()),
            "rows_per_step": self.get_total_train_batch_size(self.args),
            "measured_since": {key: [float(x) for x in found] for key, found in measured.items()},
        }


def _rng_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states
