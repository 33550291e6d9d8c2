"""Optimizer steps of a trainer, timed one by one; of a few more, what collectives take."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StepTimes", "collective_seconds"]


@dataclass(slots=True, kw_only=True)
class StepTimes(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Warm-up, timed steps, then profiled ones.

    A step is everything from the trainer's call to the next: rows, micro-batches, gradients,
    clipping, the optimizer. The device is waited for at both ends.

    Args:
        num_warmup: Steps that are not timed.
        num_timed: Steps that are.
        num_profiled: Steps under torch's profiler, which slows them down, at the end.
    """

    num_warmup: int
    num_timed: int
    num_profiled: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Without padding, as the trainer counts them: over all ranks of the world."""
    profiled_seconds: float = 0.0
    in_collectives: float = 0.0
    _start: float = 0.0
    _seen: float = 0.0
    _profile: Any = None

    @property
    def num_steps(self) -> int:
        """Steps that the trainer has to take."""
        return self.num_warmup + self.num_timed + self.num_profiled

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start the clock."""
        if state.global_step == self.num_warmup and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        if state.global_step >= self.num_warmup + self.num_timed:
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=activities)
            with _without_notices():
                self._profile.start()
        self._seen = float(state.num_input_tokens_seen)
        _wait()
        self._start = time.perf_counter()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Stop it."""
        _wait()
        seconds = time.perf_counter() - self._start
        if self._profile is not None:
            with _without_notices():
                self._profile.stop()
            self.profiled_seconds += seconds
            self.in_collectives += collective_seconds(self._profile.events())
            self._profile = None
        elif state.global_step > self.num_warmup:
            self.seconds.append(seconds)
            self.tokens.append(float(state.num_input_tokens_seen) - self._seen)


def collective_seconds(events: Any) -> float:
    """Seconds in which at least one collective was under way, by the profiler's events.

    On a CPU these are gloo's, from its start to its end, waiting for the others included; on a GPU
    NCCL's kernels, which may run beside others.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name.startswith("gloo:") or event.name.startswith("ncclDevKernel")
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6


@contextlib.contextmanager
def _without_notices() -> Iterator[None]:
    """While open, what torch's profiler tells its own developers on stderr goes nowhere."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
