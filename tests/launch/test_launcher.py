"""Starting ranks: how a run ends when one of them, or the person at the terminal, ends it."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tplora.errors import LaunchError
from tplora.launch.failure import Exit, FailureRecord, describe_exit, find_root_cause
from tplora.launch.launcher import default_num_processes, launch
from tplora.mesh import child_environment
from tplora.plan.axes import Axes, fill_world
from tplora.recipe.schema import ParallelTable

# What every program below starts with: it leaves its process id, then waits for its part.
_PRELUDE = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
rank = os.environ["RANK"]
(here / f"{rank}.aside").write_text(str(os.getpid()))
(here / f"{rank}.aside").rename(here / f"{rank}.pid")
while len(list(here.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
"""


def _program(folder: Path, body: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(_PRELUDE + textwrap.dedent(body))
    return [str(script), str(folder)]


def _launch(folder: Path, body: str, *, num_processes: int = 2, log_folder: Path | None = None):
    argv = _program(folder, body)
    env = child_environment(num_processes)
    launch(argv, num_processes=num_processes, log_folder=log_folder, env=env)


def _pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _wait_until(condition, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.world
def test_ranks_know_their_place_and_rank_1_writes_to_its_log(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    body = """
    print(rank, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"])
    print("to stderr", rank, file=sys.stderr)
    """
    _launch(tmp_path, body, num_processes=2, log_folder=tmp_path / "logs")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    out, err = capfd.readouterr()
    assert out == f"0 0 2 {threads}\n"
    assert err == "to stderr 0\n"
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert log == f"1 1 2 {threads}\nto stderr 1\n"
    assert os.listdir(tmp_path / "logs") == ["rank1.log"]


@pytest.mark.world
def test_a_rank_that_raises_ends_all_and_is_quoted_once(tmp_path, capfd):
    body = """
    if rank == "1":
        raise ValueError("boom")
    time.sleep(60)
    """
    start = time.monotonic()
    with pytest.raises(LaunchError, match=r"^rank 1 of 2 stopped with ValueError .*rank1\.log$"):
        _launch(tmp_path, body, log_folder=tmp_path / "logs")
    assert time.monotonic() - start < 10
    assert not any(map(_is_running, _pids(tmp_path)))
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.count("boom") == 2  # its source line and its message
    assert "runpy" not in err
    assert "SIGTERM" not in err
    assert "boom" in (tmp_path / "logs" / "rank1.log").read_text()


@pytest.mark.world
def test_a_raising_rank_0_is_quoted_once_too(tmp_path, capfd):
    body = """
    if rank == "0":
        raise ValueError("boom")
    time.sleep(60)
    """
    with pytest.raises(LaunchError, match="rank 0 of 2 stopped with ValueError"):
        _launch(tmp_path, body)
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.world
def test_a_mistake_of_the_user_is_one_line_without_traceback(tmp_path, capfd):
    body = """
    from tplora.errors import TrainError
    raise TrainError("step 3: the loss is nan; lower train.learning_rate")
    """
    with pytest.raises(LaunchError, match=r"^step 3: the loss is nan; lower train\.learning_rate$"):
        _launch(tmp_path, body)
    assert capfd.readouterr() == ("", "")


@pytest.mark.world
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("print('last words', flush=True); os._exit(3)", "exited with status 3"),
        (
            "print('last words', flush=True); os.kill(os.getpid(), 9)",
            r"SIGKILL \(out of memory\?\)",
        ),
    ],
    ids=["exit", "kill"],
)
def test_a_rank_that_dies_without_a_word_is_named_with_its_last_lines(
    tmp_path, capfd, ending, said
):
    body = f"""
    if rank == "1":
        {ending}
    time.sleep(60)
    """
    with pytest.raises(LaunchError, match=f"rank 1 of 2 .*{said}"):
        _launch(tmp_path, body)
    assert not any(map(_is_running, _pids(tmp_path)))
    assert "last words" in capfd.readouterr().err


@pytest.mark.world
def test_a_rank_killed_in_a_collective_is_the_cause_not_the_peer_that_waits(tmp_path, capfd):
    body = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == "1":
        os.kill(os.getpid(), 9)
    dist.all_reduce(torch.ones(1))
    """
    with pytest.raises(LaunchError, match=r"rank 1 of 2 was killed by SIGKILL"):
        _launch(tmp_path, body)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.world
def test_peers_that_hang_in_a_collective_are_ended(tmp_path):
    body = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    if rank == "0":
        (here / "failed").write_text(str(time.time()))
        time.sleep(0.5)
        raise KeyError("lost")
    dist.all_reduce(torch.ones(1))
    """
    with pytest.raises(LaunchError, match="rank 0 of 2 stopped with KeyError"):
        _launch(tmp_path, body)
    assert time.time() - float((tmp_path / "failed").read_text()) < 8
    assert not any(map(_is_running, _pids(tmp_path)))


@pytest.mark.world
def test_what_a_failed_rank_started_itself_is_ended(tmp_path):
    body = """
    import subprocess
    if rank == "1":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (here / "child.pid").write_text(str(child.pid))
        os._exit(3)
    time.sleep(60)
    """
    with pytest.raises(LaunchError):
        _launch(tmp_path, body)
    _wait_until(lambda: not any(map(_is_running, _pids(tmp_path))), timeout_s=5)


_LAUNCHER = """
from tplora.cli import app, main
from tplora.launch.launcher import launch

@app.command()
def wait(argv: list[str]):
    launch(argv, num_processes=2, log_folder=None, env={})

main()
"""


@pytest.mark.world
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=["interrupt", "terminate", "kill"],
)
def test_a_signal_to_the_launcher_leaves_no_process_and_rank_0_had_the_terminal(
    tmp_path, number, code
):
    body = "(here / rank).write_text(str((os.isatty(1), os.isatty(2)))); time.sleep(60)"
    command = [sys.executable, "-c", _LAUNCHER, "wait", *_program(tmp_path, body)]
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "wb"):
        launcher = subprocess.Popen(command, stdout=theirs, stderr=theirs)
        _wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        start = time.monotonic()
        launcher.send_signal(number)
        assert launcher.wait(timeout=20) == code
        _wait_until(lambda: not any(map(_is_running, _pids(tmp_path))), timeout_s=5)
    assert time.monotonic() - start < 10
    assert (tmp_path / "0").read_text() == "(True, True)"
    assert (tmp_path / "1").read_text() == "(False, False)"


def test_the_users_own_variables_win(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert not {"OMP_NUM_THREADS", "TRANSFORMERS_VERBOSITY"} & set(child_environment(2))


def test_every_rank_has_a_thread_however_many_there_are(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert child_environment(1000)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("tp_size", "num_gpus", "expected"),
    [("auto", 0, 1), (3, 0, 3), ("auto", 8, 8), (8, 8, 8), (2, 8, 2), (1, 1, 1)],
)
def test_a_run_has_tp_size_processes_and_auto_is_every_gpu(tp_size, num_gpus, expected):
    parallel = ParallelTable(tp_size=tp_size)
    assert default_num_processes(parallel, num_gpus=num_gpus) == expected


@pytest.mark.parametrize(
    ("tp_size", "num_gpus", "expected"), [("auto", 0, 2), ("auto", 8, 8), (3, 0, 6), (2, 8, 4)]
)
def test_every_copy_of_the_model_has_tp_size_processes(tp_size, num_gpus, expected):
    parallel = ParallelTable(tp_size=tp_size, dp_replicate_size=2)
    assert default_num_processes(parallel, num_gpus=num_gpus) == expected
    assert fill_world(expected, parallel).tp_size == expected // 2


def test_more_processes_than_gpus_are_refused_with_what_to_do():
    with pytest.raises(LaunchError, match="tp_size = 2: this machine has 1 GPU; set it to 1 or"):
        default_num_processes(ParallelTable(tp_size=2), num_gpus=1)
    parallel = ParallelTable(tp_size=2, dp_replicate_size=2)
    with pytest.raises(LaunchError, match="product of its sizes = 4: this machine has 3 GPUs; set"):
        default_num_processes(parallel, num_gpus=3)


def test_a_world_of_another_size_is_refused_with_every_size():
    assert fill_world(4, ParallelTable()) == Axes(tp_size=4)
    assert fill_world(4, ParallelTable(tp_size=4)) == Axes(tp_size=4)
    with pytest.raises(LaunchError, match="parallel: tp_size 3 needs 3 processes, 4 were started"):
        fill_world(4, ParallelTable(tp_size=3))
    message = "parallel: dp_replicate_size 3 x tp_size 2 needs 6 processes, 4 were started; use --n"
    with pytest.raises(LaunchError, match=message):
        fill_world(4, ParallelTable(tp_size=2, dp_replicate_size=3))
    with pytest.raises(LaunchError, match='"auto": 4 processes cannot be shared out to 3 groups'):
        fill_world(4, ParallelTable(dp_replicate_size=3))


def _record(time_s: float, *, is_lost_peer: bool = False) -> FailureRecord:
    return FailureRecord(
        time_s=time_s,
        type_name="RuntimeError",
        message="",
        is_user_error=False,
        is_lost_peer=is_lost_peer,
        traceback="",
    )


def test_the_cause_is_the_first_exception_then_a_silent_death_then_a_lost_peer():
    own = Exit(rank=3, code=1, record=_record(2.0))
    later = Exit(rank=0, code=1, record=_record(2.5))
    silent = Exit(rank=1, code=-9, record=None)
    peer = Exit(rank=0, code=1, record=_record(1.0, is_lost_peer=True))
    ended = Exit(rank=2, code=-15, record=None)
    assert find_root_cause([ended, peer, silent, later, own]) is own
    assert find_root_cause([ended, peer, silent]) is silent
    assert find_root_cause([ended, peer]) is peer


def test_an_exit_code_reads_as_words():
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(4).startswith("exited with status 4")
