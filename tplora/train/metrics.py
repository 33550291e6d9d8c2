"""What a run measured of itself: one JSON object per logged step, unrounded, in metrics.jsonl.

Objects of training steps: step, loss, grad_norm, learning_rate, tokens_per_s, peak_bytes. Objects
of evaluations: step, eval_loss. Where answers are preferred, both have rewards/chosen, /rejected,
/margins and DPO's /accuracies as well, those of an evaluation with eval_ before them. The trainer
hands its numbers to callbacks as Python floats, not rounded (transformers 5.24), and Python writes
a float in the digits that give it back exactly.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tplora.errors import ArtifactError, TrainError
from tplora.files import write_text_aside
from tplora.train.progress import TrainingProgress

__all__ = ["MetricsCallback", "peak_memory", "read_metrics"]


class MetricsCallback(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Writes metrics.jsonl, shows progress, and stops a run whose numbers are no longer finite.

    Every rank has one, since every rank has to stop: what the trainer logs is gathered, so all see
    the same numbers. Speed is tokens without padding, of all data ranks, each counted once however
    many ranks of a tp group saw it; evaluating and saving take no part in its time. Peak memory is
    this process's: on the GPU what torch allocated, else the largest resident size.

    Needs of the training arguments ``include_num_input_tokens_seen="non_padding"`` (the exact
    counter) and ``logging_nan_inf_filter=False`` (its default hides non-finite losses).

    Args:
        path: The file, in a folder that exists. A run that goes on from a checkpoint keeps what was
            written up to there.
        tp_size: Ranks that are given the same batch.
        is_writer: Whether this rank writes the file.
        progress: Where to show the numbers: a terminal, a log, or nowhere.
    """

    reads_checkpoints = False

    def __init__(
        self,
        path: Path,
        *,
        tp_size: int,
        is_writer: bool,
        progress: Sequence[TrainingProgress] = (),
    ) -> None:
        self._path = path
        self._tp_size = tp_size
        self._is_writer = is_writer
        self._progress = progress
        self._clock = _Clock()
        self._tokens_logged = 0
        self._num_eval_batches = 0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Check the arguments, keep the lines up to the step that training starts from."""
        _check_arguments(args)
        if self._is_writer:
            _keep_up_to(self._path, state.global_step)
        self._tokens_logged = state.num_input_tokens_seen
        self._clock = _Clock()
        for progress in self._progress:
            progress.begin(state.global_step, state.max_steps)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the step's time."""
        self._clock.count()
        for progress in self._progress:
            progress.advance(state.global_step)

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Show that an evaluation is going on."""
        self._num_eval_batches += 1
        for progress in self._progress:
            progress.show_evaluation(self._num_eval_batches)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the evaluation's time out."""
        self._num_eval_batches = 0
        self._clock.skip()

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Leave the checkpoint's time out."""
        self._clock.skip()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any],
        **kwargs: Any,
    ) -> None:
        """Write and show what was logged.

        Raises:
            TrainError: On every rank alike, if a loss or the gradient norm is not finite.
        """
        _check_finite(logs, step=state.global_step, is_scaled=args.fp16)
        record = {"step": state.global_step}
        if "loss" in logs:
            record |= {name: logs[name] for name in _TRAINED if name in logs}
            record |= {name: logs[name] for name in logs if name.startswith("rewards/")}
            record |= {"tokens_per_s": self._tokens_per_s(state), "peak_bytes": peak_memory()}
        record |= {name: value for name, value in logs.items() if _is_evaluated(name)}
        if len(record) == 1:
            return  # the totals at the end of training
        if self._is_writer:
            _append(self._path, record)
        for progress in self._progress:
            progress.show_record(record)

    def _tokens_per_s(self, state: TrainerState) -> float:
        self._clock.count()  # the trainer has just waited for the device to give it the loss
        tokens = (state.num_input_tokens_seen - self._tokens_logged) / self._tp_size
        self._tokens_logged = state.num_input_tokens_seen
        return float(tokens / self._clock.seconds_since_last_call())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the objects of a metrics.jsonl; a last line that was cut off is left out.

    Raises:
        ArtifactError: If the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise ArtifactError(f"{path}, line {number}: not a JSON object") from None
    return records


_TRAINED = ("loss", "grad_norm", "learning_rate")


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval_") and (name.endswith("loss") or "rewards/" in name)


def _check_arguments(args: TrainingArguments) -> None:
    if args.logging_nan_inf_filter:
        raise TrainError(
            "train.logging_nan_inf_filter = true: it hides losses that are not finite, which have "
            "to stop the run; set it to false"
        )
    if args.include_num_input_tokens_seen != "non_padding":
        raise TrainError(
            f'train.include_num_input_tokens_seen = "{args.include_num_input_tokens_seen}": '
            'tokens_per_s counts tokens without padding; set it to "non_padding"'
        )


def _check_finite(logs: Mapping[str, Any], *, step: int, is_scaled: bool) -> None:
    """Check every loss, and the gradient norm, unless fp16's loss scaling skips such steps."""
    names = [name for name in logs if name.endswith("loss")]
    names += [] if is_scaled else ["grad_norm"]
    bad = [f"{n} is {logs[n]}" for n in names if n in logs and not math.isfinite(logs[n])]
    if bad:
        raise TrainError(
            f"step {step}: {', '.join(bad)}; training stopped and nothing of this step is saved; "
            "lower train.learning_rate, use a wider dtype, or look at the rows of this step"
        )


def _append(path: Path, record: Mapping[str, float]) -> None:
    finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
    try:
        with path.open("a", encoding="utf-8") as file:  # closing flushes it
            file.write(json.dumps(finite, allow_nan=False) + "\n")
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror}") from None


def _keep_up_to(path: Path, step: int) -> None:
    """Take out what a run wrote after the checkpoint that it now goes on from."""
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    text = "".join(json.dumps(record) + "\n" for record in kept)
    write_text_aside(path, text, overwrite=True)


def peak_memory() -> int:
    """The most that this process took: what torch allocated on the GPU, else what was resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


class _Clock:
    """Seconds spent, less what was skipped."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._seconds = 0.0

    def count(self) -> None:
        """Count the time since the last mark."""
        now = time.perf_counter()
        self._seconds += now - self._mark
        self._mark = now

    def skip(self) -> None:
        """Leave out the time since the last mark."""
        self._mark = time.perf_counter()

    def seconds_since_last_call(self) -> float:
        """Return what was counted, and start from zero."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
