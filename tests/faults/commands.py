"""``tplora finetune`` as a command that runs while a test goes on, with the ranks it starts.

Started from nothing, as a person does it; or forked from the fork server of the worlds, its ranks
from it: processes of their own all the same, but for the seconds in which they import.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from unittest import mock

from tests.command import become, run_module
from tests.run.test_finetune import children_of
from tests.world import CONTEXT

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_SUBPROCESS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"


def start(
    place: Path, *argv: str, program: tuple[str, ...] = (), is_forked: bool = False
) -> "subprocess.Popen[str] | Forked":
    """``program`` is what starts tplora, where it does not start itself."""
    words = [*program, "-m", "tplora", "finetune", "recipe.toml", *argv]
    env = {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"}
    if is_forked:
        return Forked(words, place, env)
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=place,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(process: "subprocess.Popen[str] | Forked", code: int | None) -> str:
    """What it has said when it is over, with that status; None is any."""
    said, _ = process.communicate(timeout=240)
    assert code is None or process.returncode == code, said
    return said


def ranks_of(launcher: "subprocess.Popen[str] | Forked") -> list[int]:
    """The processes that it has started, in the order of their ranks."""
    if isinstance(launcher, Forked):  # whose children have no command line of their own
        listed = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        return sorted(map(int, listed))
    return children_of(launcher.pid)


class Forked:
    """What a test asks of ``subprocess.Popen``."""

    def __init__(self, words: list[str], place: Path, env: dict[str, str]) -> None:
        self._said = place / f"said-{time.monotonic_ns()}.txt"
        self._process = CONTEXT.Process(target=_become, args=(words, place, env, self._said))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("tplora", timeout, self._said.read_text())
        text = self._said.read_text(encoding="utf-8")
        self._said.unlink()
        return text, None


def _become(words: list[str], place: Path, env: dict[str, str], said: Path) -> None:
    with mock.patch(f"{_SUBPROCESS}.Popen", _ForkedRank):
        become(words, place, env, [said, said])


class _ForkedRank:
    """What torch's agent asks of ``subprocess.Popen``; the child is as after an exec."""

    def __init__(self, args: tuple[str, ...], env: dict[str, str], **kwargs: object) -> None:
        assert kwargs == {"stdout": None, "stderr": None, "start_new_session": True}
        self.args, self.returncode = args, None
        sys.stdout.flush()  # or the child would say it once more
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank([word for word in args[1:] if word not in ("-P", "-u")], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _be_rank(words: list[str], env: dict[str, str]) -> NoReturn:
    """What the launcher holds, its store among it, is not this process's to end."""
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(env)
        sys.excepthook = sys.__excepthook__
        logging.disable(logging.NOTSET)
        status = run_module(words)
    finally:
        os._exit(status)
