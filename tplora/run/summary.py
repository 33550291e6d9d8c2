"""What a finished run has to show for itself."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["RunSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run, as the person at the terminal reads it."""

    run: Path
    adapter: Path
    first_eval_loss: float | None
    """Before the first step; None when there was nothing to evaluate on."""
    last_eval_loss: float | None
    eval_accuracies: tuple[float, float] | None = None
    """How often the better answer has the higher reward, at first and at last; DPO alone."""
    best_step: int | None = None
    """The step whose adapter was saved, where it is the best and not the last one."""
    can_merge: bool
    """Whether base and adapter can be merged file by file."""
    verified_difference: float | None
    """Largest difference of a logit in plain PEFT; None when it was not looked at."""
    not_pushed: str = ""
    """Why the upload failed that was asked for."""

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each fact there is."""
        rows = [("adapter", str(self.adapter))]
        if self.first_eval_loss is not None and self.last_eval_loss is not None:
            change = f"{self.first_eval_loss:.4f} -> {self.last_eval_loss:.4f}"
            rows.append(("eval loss", change))
        if self.eval_accuracies is not None:
            change = " -> ".join(f"{share:.3f}" for share in self.eval_accuracies)
            rows.append(("accuracy", f"{change} of the pairs have the better answer ahead"))
        if self.best_step is not None:
            rows.append(("best", f"the adapter is that of step {self.best_step}"))
        if self.verified_difference is not None:
            said = f"in plain PEFT, logits differ by {self.verified_difference:.2g} at most"
            rows.append(("verified", said))
        return rows

    def next_commands(self) -> list[str]:
        """What to do with the adapter now."""
        commands = [f'tplora generate {self.run} "a prompt"', f"tplora verify {self.run}"]
        if self.can_merge:
            commands.append(f"tplora export {self.run} --merged {self.run / 'merged'}")
        return commands
