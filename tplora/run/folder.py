"""A run's folder before the run: where it lies, whether it is free, how it is cleared."""

import shutil
from contextlib import suppress
from pathlib import Path

from tplora.errors import ArtifactError
from tplora.files import check_writable

__all__ = [
    "LOGS",
    "PROBE",
    "check_run_folder",
    "clear_run_folder",
    "drop_the_end",
    "find_adapter",
    "find_probe",
]

LOGS = "logs"
"""The ranks' own output, left by a run that failed before it had anything to keep, too."""

PROBE = "probe.safetensors"
"""What the trained model said, for verify to compare with."""

# What a killed run left in the making; the adapter of a checkpoint is written aside once more.
_ASIDE = (".*.aside-*", ".adapter-*", ".shared-*")
# What tensorboard is told, under the day and the host; other runs may lie there with --output .
_EVENTS = "runs/*/events.out.tfevents.*"
# What a run writes; --overwrite removes these and nothing else.
_OWN = ("recipe.toml", "plan.txt", "adapter", "checkpoint-*", "metrics.jsonl", "loss.png",
        "log.txt", PROBE, "merged", LOGS, _EVENTS, *_ASIDE)  # fmt: skip
# Of these, what is written once training is over; and what a killed run left in the making.
_END = ("adapter", "loss.png", PROBE, "merged", *_ASIDE)


def check_run_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that holds something, or that cannot be written, before anything is done.

    Raises:
        ArtifactError: With what is there and what to do.
    """
    check_writable(folder)
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    found = [name for name in found if name != LOGS]
    if found and not overwrite:
        what = "already holds a run" if _own_files(folder) else "is not empty"
        names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise ArtifactError(
            f"{folder}: {what} ({names}); name another folder with --output, "
            "or replace the run with --overwrite"
        )


def clear_run_folder(folder: Path) -> None:
    """Remove what an earlier run left in ``folder``; what else lies there stays."""
    events = list(folder.glob(_EVENTS))
    _remove(_own_files(folder))
    for place in [*{event.parent for event in events}, folder / "runs"] if events else []:
        with suppress(OSError):  # something else lies there, or in another day's
            place.rmdir()


def drop_the_end(folder: Path) -> None:
    """Remove what says that the run in ``folder`` is over: it goes on, and will write it anew."""
    _remove(_own_files(folder, _END))


def find_adapter(run: Path) -> Path:
    """The adapter of a run's folder, or the folder itself when it is an adapter's.

    Raises:
        ArtifactError: If there is none.
    """
    for folder in (run / "adapter", run):
        if (folder / "adapter_config.json").is_file():
            return folder
    raise ArtifactError(
        f"{run}: has no adapter (adapter/adapter_config.json); name the folder of a finished run, "
        "such as runs/NAME"
    )


def find_probe(run: Path, adapter: Path) -> Path:
    """What the trained model said: in the run's folder, which a bare adapter may lie in.

    The path where it should be, if it is nowhere; ``read_probe`` says so.
    """
    places = [folder / PROBE for folder in (run, adapter, adapter.parent)]
    return next((place for place in places if place.is_file()), places[0])


def _own_files(folder: Path, patterns: tuple[str, ...] = _OWN) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
