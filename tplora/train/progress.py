"""How far training is, for the person at the terminal.

A bar where the console is a terminal; elsewhere one plain line per logged step, so that a log file
stays readable.
"""

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["TrainingProgress", "record_line"]


class TrainingProgress:
    """Progress of one run on one console. Use as a context manager, on one rank only.

    Leaving it gives the terminal back whether training ended or raised.

    Args:
        console: Where to show it; ``console.is_terminal`` decides between bar and lines.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_steps = 0
        self._bar = Progress(
            TextColumn("[bold]step[/]"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", start=False, latest="")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def begin(self, step: int, num_steps: int) -> None:
        """Start at a step that was reached before, 0 or the checkpoint's."""
        self._num_steps = num_steps
        self._bar.reset(self._task, total=num_steps, completed=step)
        self._bar.start()

    def advance(self, step: int) -> None:
        """Show that `step` is done."""
        self._bar.update(self._task, completed=step)

    def show_evaluation(self, batch: int) -> None:
        """Show that `batch` batches of the evaluation rows are done."""
        self._bar.update(self._task, latest=f"evaluating, batch {batch}")

    def show_record(self, record: Mapping[str, float]) -> None:
        """Show one object of metrics.jsonl."""
        line = record_line(record, self._num_steps)
        if self._console.is_terminal and "loss" in record:
            self._bar.update(self._task, latest=line.partition("  ")[2])
        else:  # an evaluation stays to be read, above the bar as well
            self._console.print(Text(line), soft_wrap=True)


def record_line(record: Mapping[str, float], num_steps: int) -> str:
    """Return one object of metrics.jsonl as a line to read."""
    parts = [f"step {record['step']}/{num_steps}"]
    for name, value in record.items():
        if name.endswith("loss"):
            parts.append(f"{name} {value:.4g}")
    for name, value in record.items():
        if name.endswith("rewards/margins") and value is not None:
            parts.append(f"margin {value:.3g}")
        if name.endswith("rewards/accuracies") and value is not None:
            parts.append(f"accuracy {value:.2f}")
    shown = {
        "grad_norm": "grad_norm {:.3g}",
        "learning_rate": "lr {:.1e}",
        "tokens_per_s": "{:,.0f} tokens/s",
    }
    parts += [
        form.format(record[name]) for name, form in shown.items() if record.get(name) is not None
    ]
    if "peak_bytes" in record:
        parts.append(f"{record['peak_bytes'] / 2**30:.1f} GiB")
    return "  ".join(parts)
