"""A run that is asked to end, by SIGTERM, does so at its next step, with a checkpoint of it.

One rank may be asked, or all: at the end of every step the ranks agree, so that all of them end at
the same one.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tplora.errors import PreemptedError
from tplora.mesh import largest_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["StopsWhenAsked", "asked_to_end"]


class StopsWhenAsked(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Ends training on every rank at the end of the step in which any rank was asked to.

    That step's checkpoint is saved, with all that a resumed run needs, whatever the arguments say
    of saving. Communication: one all-reduce of 8 bytes a step, on the CPU.

    Args:
        asked: Set once this rank has been asked; see ``asked_to_end``.
    """

    def __init__(self, asked: threading.Event) -> None:
        self._asked = asked
        self._is_ending = False

    @property
    def reads_checkpoints(self) -> bool:
        """Whether the next checkpoint has to be there before anything else is done."""
        return self._is_ending

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End before the first step if it was asked for while the model was loaded.

        Raises:
            PreemptedError: On every rank.
        """
        if self._is_any_asked():
            raise PreemptedError("stopped by SIGTERM before the first step; nothing was saved")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Agree with the other ranks whether this was the last step."""
        if self._is_any_asked() and state.global_step < state.max_steps:
            self._is_ending = True
            args.save_only_model = False
            control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the training once the checkpoint is there.

        Raises:
            PreemptedError: On every rank.
        """
        if self._is_ending:
            step = state.global_step
            raise PreemptedError(
                f"stopped by SIGTERM after step {step}/{state.max_steps}; checkpoint-{step} is "
                "saved; go on with --resume"
            )

    def _is_any_asked(self) -> bool:
        return bool(largest_of_ranks(int(self._asked.is_set())))


@contextmanager
def asked_to_end() -> Iterator[threading.Event]:
    """An event that SIGTERM sets, as long as the block runs; the signal does nothing else.

    Outside of the main thread no signal can be taken, and the event stays unset.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
