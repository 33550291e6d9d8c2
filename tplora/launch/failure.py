"""What a rank that failed leaves behind: written by the rank, read by whoever started it."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tplora.errors import (
    DataError,
    HubError,
    LaunchError,
    RecipeError,
    ShardError,
    TploraError,
)

__all__ = [
    "Exit",
    "FailureRecord",
    "describe_exit",
    "describe_failure",
    "find_root_cause",
    "format_traceback",
    "read_exits",
    "record_failure",
    "will_come_again",
]

_USAGE = 2  # what a command line exits with that cannot be understood

# Files whose frames only say how the program was entered; the reader wants what comes after.
_WRAPPERS = ("runpy", os.path.join("launch", "rank.py"), os.path.join("tplora", "__main__.py"))
_WRAPPER_PACKAGES = ("typer", "click")

# What the same run does again, whenever it is started: asked for wrongly, not gone wrong. A run
# whose upload failed is complete, and would be trained again for nothing.
_CERTAIN = (RecipeError, DataError, HubError, ShardError, LaunchError)

# What gloo and NCCL say when the other side is gone: a consequence, hardly ever the cause.
_LOST_PEER_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecord:
    """One exception that ended a rank."""

    time_s: float
    """Seconds since the epoch, to the microsecond: the first one is usually the cause."""
    type_name: str
    message: str
    is_user_error: bool
    """Whether it is a TploraError, which reads without a traceback."""
    is_lost_peer: bool
    """Whether it only says that another rank is gone."""
    traceback: str
    is_certain: bool = False
    """Whether it would come again if all were started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one rank ended, when it did not end well."""

    rank: int
    code: int
    """As subprocess has it: negative for a signal."""
    record: FailureRecord | None


def record_failure(path: Path, error: BaseException) -> None:
    """Write what ``error`` is to ``path``, whole or not at all."""
    record = FailureRecord(
        time_s=time.time(),
        type_name=type(error).__name__,
        message=str(error),
        is_user_error=isinstance(error, TploraError),
        is_lost_peer=any(_is_lost_peer(link) for link in _chain(error)),
        is_certain=isinstance(error, _CERTAIN),
        traceback=format_traceback(error, max_frames=20),
    )
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(asdict(record)), encoding="utf-8")
    aside.replace(path)


def read_exits(folder: Path, codes: Mapping[int, int]) -> list[Exit]:
    """Put exit codes by rank and the records under ``folder`` together."""
    exits = []
    for rank, code in sorted(codes.items()):
        path = folder / f"rank{rank}.json"
        record = None
        if path.is_file():
            record = FailureRecord(**json.loads(path.read_text(encoding="utf-8")))
        exits.append(Exit(rank=rank, code=code, record=record))
    return exits


def find_root_cause(exits: Iterable[Exit]) -> Exit:
    """The exit that the others follow from.

    An exception of its own comes first (the earliest), then a death without a word, then a lost
    peer, then the ranks that the launcher itself ended.
    """
    return min(exits, key=_rank_of_cause)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exited with status {code} without an exception"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def describe_failure(cause: Exit, *, num_processes: int, log: Path | None) -> LaunchError:
    """The one line for the person at the terminal; the traceback is shown apart from it."""
    record = cause.record
    if record is not None and record.is_user_error:
        return LaunchError(record.message)
    where = f"rank {cause.rank} of {num_processes}"
    wrote = f"; its log is {log}" if log else ""
    if record is not None:
        return LaunchError(f"{where} stopped with {record.type_name} (traceback above){wrote}")
    return LaunchError(f"{where} {describe_exit(cause.code)}; the other ranks were ended{wrote}")


def will_come_again(cause: Exit, last_said: str | None) -> bool:
    """Whether starting all ranks again would only end the same way.

    Args:
        cause: Why they ended.
        last_said: The message of the time before: an error of ours that comes a second time, word
            for word, comes a third time.
    """
    if cause.record is None:
        return cause.code == _USAGE
    is_repeated = cause.record.is_user_error and cause.record.message == last_said
    return cause.record.is_certain or is_repeated


def format_traceback(error: BaseException, *, max_frames: int) -> str:
    """The traceback of ``error`` and its causes, without the frames that only enter the program.

    Args:
        error: A raised exception.
        max_frames: Of each link of the chain, at most so many frames: the last ones.
    """
    whole = traceback.TracebackException.from_exception(error, compact=True)
    _shorten(whole, max_frames)
    return "".join(whole.format())


def _shorten(link: traceback.TracebackException | None, max_frames: int) -> None:
    if link is None:
        return
    frames = [frame for frame in link.stack if not _is_wrapper(frame.filename)]
    link.stack = traceback.StackSummary.from_list(frames[-max_frames:])
    _shorten(link.__cause__, max_frames)
    _shorten(link.__context__, max_frames)


def _is_wrapper(filename: str) -> bool:
    if filename == "<frozen runpy>" or filename.endswith(_WRAPPERS):
        return True
    folders = Path(filename).parts
    return "site-packages" in folders and any(name in folders for name in _WRAPPER_PACKAGES)


def _chain(error: BaseException) -> Iterable[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def _is_lost_peer(error: BaseException) -> bool:
    if type(error).__module__.startswith("torch.distributed"):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(w in said for w in _LOST_PEER_WORDS)


def _rank_of_cause(found: Exit) -> tuple[int, float, int]:
    if found.record is not None:
        return (2 if found.record.is_lost_peer else 0, found.record.time_s, found.rank)
    return (3 if found.code == -signal.SIGTERM else 1, 0.0, found.rank)
