"""``tplora ...`` as a process forked from the fork server of the worlds, whose imports are made."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.world import CONTEXT

__all__ = ["forked_tplora"]


def forked_tplora(
    *argv: str, cwd: Path, timeout_s: float = 240, **env: str
) -> subprocess.CompletedProcess[str]:
    """What the command says and its status, as ``subprocess.run`` gives them.

    A process of its own, entered and left as the interpreter does it, but for its imports.
    """
    with tempfile.TemporaryDirectory(prefix="command-") as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        proc = CONTEXT.Process(target=_become_tplora, args=(argv, cwd, env, said))
        proc.start()
        proc.join(timeout_s)
        if proc.exitcode is None:
            proc.kill()
            raise subprocess.TimeoutExpired(argv, timeout_s)
        texts = [path.read_text(encoding="utf-8") for path in said]
        return subprocess.CompletedProcess(argv, proc.exitcode, *texts)


def _become_tplora(argv: tuple[str, ...], cwd: Path, env: dict[str, str], said: list[Path]) -> None:
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.update(env)
    sys.argv = ["tplora", *argv]
    status = 1
    try:
        runpy.run_module("tplora", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as leaving:
        status = leaving.code or 0
    except BaseException:  # the interpreter would do the same
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(status)
