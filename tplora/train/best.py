"""The best checkpoint at the end, and stopping when nothing becomes better; on resuming, too.

Which one is best is transformers' own decision, by numbers that are the first rank's on every rank.
Here its factors are cut again, and what a resumed run has to know of it is put right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tplora.adapter.load import load_factors
from tplora.errors import ArtifactError, TrainError
from tplora.train.checkpoint import ResumesAtAnySize

__all__ = ["KeepsBest"]


class KeepsBest(ResumesAtAnySize):
    """Put before any ``Trainer`` whose model is a ``TploraModel``.

    Raises:
        TrainError: If the best is asked for and none would be known at the end.
        ArtifactError: If a run is resumed whose best checkpoint is gone.
    """

    _has_stopped = False
    """Whether a resumed run had stopped early before it was resumed."""

    @property
    def best_step(self: Any) -> int | None:
        """The step whose factors the model has now; None where it is the last one."""
        best = self.state.best_model_checkpoint
        if not self.args.load_best_model_at_end or best is None:
            return None
        return int(Path(best).name.partition("-")[2])

    def _load_best_model(self: Any) -> None:
        """Fill the factors from the best checkpoint. Every rank reads its pieces."""
        load_factors(self.model, Path(self.state.best_model_checkpoint))

    def _take_progress(self: Any, folder: Path) -> None:
        super()._take_progress(folder)
        run = Path(self._get_output_dir(trial=None))
        # A path in the state is that of the run as it lay then.
        self.state.best_model_checkpoint = None
        self._note_best(run, folder)
        step = self.state.best_global_step
        if self.args.load_best_model_at_end and step and not self.state.best_model_checkpoint:
            raise ArtifactError(
                f"{run}/checkpoint-{step}: is the best checkpoint so far, and gone; put it back, "
                "or set train.load_best_model_at_end = false"
            )
        found = self.state.stateful_callbacks.get("EarlyStoppingCallback")
        self._has_stopped = bool(found) and _is_at_its_end(found)

    def _run_epoch(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_is_judged()
        if self._has_stopped:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _check_is_judged(self: Any) -> None:
        asked = self.args
        if not asked.load_best_model_at_end or asked.eval_strategy != "steps":
            return
        if self.state.eval_steps > self.state.max_steps:
            raise TrainError(
                f"train.load_best_model_at_end = true: the first evaluation is at step "
                f"{self.state.eval_steps}, the run ends at step {self.state.max_steps}, so that "
                "none would be the best; lower train.eval_steps and train.save_steps"
            )


def _is_at_its_end(callback: dict[str, dict[str, Any]]) -> bool:
    """Whether the state of transformers' ``EarlyStoppingCallback`` says that it has stopped."""
    waited = callback["attributes"]["early_stopping_patience_counter"]
    return bool(waited >= callback["args"]["early_stopping_patience"])
