"""Where a run begins: at its first step, or at a checkpoint; on every rank the same."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING

from tplora.errors import ArtifactError
from tplora.files import write_text_aside
from tplora.mesh import current_processes, largest_of_ranks, num_restarts, tell_all
from tplora.run.folder import drop_the_end
from tplora.train.checkpoint import last_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tplora.run.start import Start

__all__ = ["check_shared_folder", "find_start"]

# Seconds in which a file written on one node is seen on the others; NFS may keep what it knew.
_SEEN_S = 60


def find_start(folder: Path, start: Start, *, say: Callable[[str], None]) -> Path | None:
    """The checkpoint from which every rank goes on; None is the first step. Collective.

    A run whose ranks were started again goes on as well as it can, whatever was asked for first.

    Raises:
        ArtifactError: On every rank, if there is nothing to go on from and that was asked for, or
            if a rank does not see it.
    """
    is_restarted = largest_of_ranks(num_restarts()) > 0
    if not (start.goes_on or is_restarted):
        return None
    found = last_checkpoint(folder, say=say)
    if found is not None:
        blind = largest_of_ranks(-1 if found.is_dir() else current_processes().rank)
        if blind >= 0:
            raise ArtifactError(_say_blind(folder, blind))
        return found
    if not (start.or_begin or is_restarted):
        raise ArtifactError(f"{folder}: has no checkpoint to resume; start it again")
    if current_processes().rank == 0:
        drop_the_end(folder)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    return None


def check_shared_folder(folder: Path) -> None:
    """Refuse a run's folder that not all ranks see, where checkpoints will be written. Collective.

    Raises:
        ArtifactError: On every rank, naming one that does not see it.
    """
    processes = current_processes()
    token = tell_all(uuid.uuid4().hex)
    mark = folder / f".shared-{token}"
    if processes.rank == 0:
        write_text_aside(mark, token)
    tell_all(None)  # it has been written
    blind = largest_of_ranks(-1 if _appears(mark) else processes.rank)
    if processes.rank == 0:
        mark.unlink(missing_ok=True)
    if blind >= 0:
        raise ArtifactError(_say_blind(folder, blind))


def _appears(path: Path) -> bool:
    end = time.monotonic() + _SEEN_S
    while not path.is_file():
        if time.monotonic() > end:
            return False
        time.sleep(0.5)
    return True


def _say_blind(folder: Path, rank: int) -> str:
    return (
        f"{folder}: rank {rank} does not see what the first rank has there; the nodes of a run "
        "with checkpoints have to share its folder: name one on a shared file system with "
        '--output, or set train.save_strategy = "no"'
    )
