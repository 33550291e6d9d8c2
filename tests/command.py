"""``tplora ...`` as a process forked from the fork server of the worlds, whose imports are made."""

import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.world import CONTEXT

__all__ = ["become", "forked_tplora", "run_module"]


def forked_tplora(
    *argv: str, cwd: Path, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """What the command says and its status, as ``subprocess.run`` gives them.

    A process of its own, entered and left as the interpreter does it, but for its imports.
    """
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        proc = CONTEXT.Process(target=become, args=(("-m", "tplora", *argv), cwd, env, said))
        proc.start()
        proc.join(timeout_s)
        if proc.exitcode is None:
            proc.kill()
            raise subprocess.TimeoutExpired(argv, timeout_s)
        texts = [path.read_text(encoding="utf-8") for path in said]
        return subprocess.CompletedProcess(argv, proc.exitcode, *texts)


def become(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], said: Sequence[Path]
) -> NoReturn:
    """Be ``python WORDS``, whose output goes into two files, or into one that is named twice."""
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.update(env)
    sys.exit(run_module(words))


def run_module(words: Sequence[str]) -> int:
    """``-m MODULE ARGUMENT ...``, entered and left as the interpreter does it; the status."""
    flag, module, *arguments = words
    assert flag == "-m"
    sys.argv = [module, *arguments]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:  # the interpreter would do the same
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
