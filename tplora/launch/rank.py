"""One launched process: where it writes, what it leaves behind when it fails, how it ends.

    python -m tplora.launch.rank RECORDS LOGS (-m MODULE | SCRIPT) [ARGUMENT ...]

RECORDS and LOGS are folders; the first rank of a node keeps the terminal, rank 1 writes to
LOGS/rank1.log, and on when it is started again.

Imports nothing heavy, so that all this holds from the process's first moment.
"""

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tplora.launch.failure import record_failure

__all__ = ["main", "run_program"]

# Linux: prctl(PR_SET_PDEATHSIG, ...); from linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Seconds that a failed rank may spend on its way out before the kernel ends it.
_EXIT_S = 3


def main() -> None:
    """Run a program as one rank; an exception goes to ``RECORDS``, not to the terminal."""
    records, logs, *program = sys.argv[1:]
    rank, is_first = os.environ["RANK"], os.environ["LOCAL_RANK"] == "0"
    _die_with_launcher()
    faulthandler.enable()
    if not is_first:
        _write_to(Path(logs) / f"rank{rank}.log")
    try:
        run_program(program)
    except Exception as error:
        record_failure(Path(records) / f"rank{rank}.json", error)
        if not is_first:
            sys.excepthook(type(error), error, error.__traceback__)
        _leave()


def run_program(program: Sequence[str]) -> None:
    """Run ``-m module`` or a script in this process, as the interpreter would."""
    if program[0] == "-m":
        sys.argv = list(program[1:])
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        runpy.run_path(program[0], run_name="__main__")


def _die_with_launcher() -> None:
    """No orphans: the kernel ends this process when the one that started it is gone, however."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write_to(log: Path) -> None:
    """Send all output to one file, line by line, so that it reads in order."""
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    how = os.O_APPEND if is_restarted else os.O_TRUNC
    file = os.open(log, os.O_WRONLY | os.O_CREAT | how, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _leave() -> NoReturn:
    """Exit with status 1 in the usual way, but within seconds: peers wait for this rank's end."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXIT_S)
    sys.exit(1)


if __name__ == "__main__":
    main()
