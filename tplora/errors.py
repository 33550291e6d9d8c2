"""Every error a user can cause, by the stage that finds it.

One line each: where, what was found, what is needed, what to do.
"""

import re
from collections.abc import Sequence

__all__ = [
    "ArtifactError",
    "DataError",
    "HubError",
    "LaunchError",
    "PlanError",
    "PreemptedError",
    "RecipeError",
    "ShardError",
    "SourceError",
    "TploraError",
    "TrainError",
]


class TploraError(Exception):
    """A mistake that a person can mend; the command line prints it without a traceback."""


class RecipeError(TploraError):
    """Everything that is wrong with a recipe, one line per problem.

    Args:
        problems: One line each: key path, what was found, what is needed, what to do.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class PlanError(RecipeError):
    """What cannot be exact at this tp_size, all of it, found before any weight is read.

    What is said of many layers alike is said once, of the first, with their number.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        kinds: dict[str, list[str]] = {}
        for problem in problems:
            kinds.setdefault(_LAYER.sub(".*", problem), []).append(problem)
        super().__init__([_say_once(found) for found in kinds.values()])


_LAYER = re.compile(r"(?<=[a-z_])\.\d+(?=\.[a-z_])")
"""A layer's number inside a module's name; a decimal number's digits are not between letters."""


def _say_once(problems: list[str]) -> str:
    first, more = problems[0], len(set(problems)) - 1
    return first if more == 0 else f"{first} (and {more} more like it)"


class SourceError(TploraError):
    """A model cannot be had from where the recipe says it is."""


class ShardError(TploraError):
    """A tensor on this rank is not the piece that the plan says it is."""


class DataError(TploraError):
    """The rows cannot be trained on."""


class TrainError(TploraError):
    """Training has to stop: a non-finite number, or ranks that no longer agree."""


class PreemptedError(TploraError):
    """The run was asked to end and did; it goes on when it is started again."""


class ArtifactError(TploraError):
    """A file of a run cannot be written, read or trusted."""


class HubError(ArtifactError):
    """The hub does not take what is to be uploaded; what was written here is whole."""


class LaunchError(TploraError):
    """The processes cannot be started as asked, or one of them failed."""
