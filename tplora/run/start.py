"""How a run is asked to begin. Plain values, for the command line and for every rank."""

from dataclasses import dataclass

__all__ = ["Start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What was asked for. A new run in a free folder when left out."""

    resume: bool = False
    """Go on from the folder's last whole checkpoint."""
    or_begin: bool = False
    """Go on from it if there is one, else begin; what a scheduler says every time."""
    overwrite: bool = False
    """Begin, in place of the run that the folder holds."""

    @property
    def goes_on(self) -> bool:
        """Whether what the folder holds is kept."""
        return self.resume or self.or_begin

    def options(self) -> list[str]:
        """What the ranks are told of it; the folder is cleared before they start."""
        given = [(self.resume, "--resume"), (self.or_begin, "--resume-or-start")]
        return [option for is_given, option in given if is_given]
