"""Ranks that are started again after a failure, on one node and on two; small programs as ranks."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.launch.test_launcher import _is_running, _pids, _wait_until
from tplora.errors import LaunchError
from tplora.launch.launcher import launch
from tplora.launch.nodes import Nodes, processes_of_node
from tplora.mesh import PREEMPTED
from tplora.recipe.schema import ParallelTable

PRELUDE = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(here / f"{rank}.aside{attempt}").write_text(str(os.getpid()))
(here / f"{rank}.aside{attempt}").rename(here / f"{rank}.{attempt}.pid")
while len(list(here.glob(f"*.{attempt}.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
"""


def program(folder: Path, body: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    return [str(script), str(folder)]


def run(folder: Path, body: str, *, max_restarts: int) -> list[str]:
    said: list[str] = []
    launch(
        program(folder, body),
        num_processes=2,
        log_folder=None,
        env={},
        max_restarts=max_restarts,
        say=said.append,
    )
    return said


def starts(folder: Path) -> int:
    return len(list(folder.glob("1.*.pid")))


@pytest.mark.world
def test_failed_ranks_are_started_again_as_often_as_asked_and_each_time_is_said(tmp_path):
    said = run(
        tmp_path,
        """
        if attempt == 0 and rank == "1":
            os.kill(os.getpid(), 9)
        if attempt == 1 and rank == "0":
            raise OSError("the disk is away")
        if attempt < 2:
            time.sleep(60)
        """,
        max_restarts=3,
    )
    assert said == [
        "restart 1 of 3: rank 1 of 2 was killed by SIGKILL (out of memory?); "
        "going on from the last whole checkpoint",
        "restart 2 of 3: rank 0 of 2 stopped with OSError: the disk is away; "
        "going on from the last whole checkpoint",
    ]
    assert starts(tmp_path) == 3
    assert not any(map(_is_running, _pids(tmp_path)))


@pytest.mark.world
def test_ranks_that_were_started_again_find_each_other_and_not_those_before(tmp_path):
    body = """
    import torch, torch.distributed as dist
    from tplora.mesh import current_processes, join_process_group, leave_process_group
    join_process_group(current_processes())
    found = torch.ones(1)
    dist.all_reduce(found)
    (here / f"{rank}.{attempt}.sum").write_text(str(int(found)))
    if attempt < 2:
        os.kill(os.getpid(), 9)
    leave_process_group()  # gloo may abort a process that ends in a group whose peer has gone
    """
    assert len(run(tmp_path, body, max_restarts=2)) == 2
    assert (tmp_path / "0.2.sum").read_text() == (tmp_path / "1.2.sum").read_text() == "2"


@pytest.mark.world
def test_it_gives_up_with_the_last_cause(tmp_path, capfd):
    body = "if rank == '1': raise OSError(f'away for the {attempt}. time')\ntime.sleep(60)"
    with pytest.raises(LaunchError, match=r"rank 1 of 2 .*OSError .*\(after 1 of 1 restarts\)"):
        run(tmp_path, body, max_restarts=1)
    assert starts(tmp_path) == 2
    err = capfd.readouterr().err
    assert "away for the 1. time" in err
    assert "away for the 0. time" not in err


@pytest.mark.world
@pytest.mark.parametrize(
    ("ending", "num_starts"),
    [
        ("from tplora.errors import PlanError; raise PlanError(['tp_size 5: refused'])", 1),
        ("from tplora.errors import DataError; raise DataError('tp_size 5: refused')", 1),
        ("from tplora.errors import TrainError; raise TrainError('tp_size 5: refused')", 2),
    ],
    ids=["plan", "rows", "the same once more"],
)
def test_what_would_only_come_again_is_not_tried_again(tmp_path, ending, num_starts):
    with pytest.raises(LaunchError, match="tp_size 5: refused"):
        run(tmp_path, f"{ending}", max_restarts=9)
    assert starts(tmp_path) == num_starts


@pytest.mark.world
@pytest.mark.parametrize("code", [2, PREEMPTED], ids=["usage", "asked-to-end"])
def test_ranks_that_ended_for_good_are_not_started_again(tmp_path, code):
    with pytest.raises((LaunchError, SystemExit)) as caught:
        run(tmp_path, f"sys.exit({code})", max_restarts=9)
    assert starts(tmp_path) == 1
    if code == PREEMPTED:
        assert caught.value.code == PREEMPTED


_LAUNCHER = """
import sys
from tplora.cli import app, main
from tplora.launch.launcher import launch
from tplora.launch.nodes import Nodes

@app.command()
def wait(num_nodes: int, node: int, endpoint: str, restarts: int, argv: list[str]):
    nodes = Nodes(num_nodes=num_nodes, node_rank=node, endpoint=endpoint if num_nodes > 1 else None)
    launch(argv, num_processes=2 // num_nodes, log_folder=None, env={}, nodes=nodes,
           max_restarts=restarts, say=lambda line: print(line, flush=True))

main()
"""


def start_node(argv, node=0, *, num_nodes=1, port=0, restarts=0):
    options = [str(num_nodes), str(node), f"127.0.0.1:{port}", str(restarts)]
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, "wait", *options, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SAVES = """
import signal
done = []
signal.signal(signal.SIGTERM, lambda *_: done.append(1))
(here / f"{rank}.waits").touch()
while not done and not (here / "asked").exists():
    time.sleep(0.02)
(here / "asked").touch()
sys.exit(75)
"""


@pytest.mark.world
@pytest.mark.parametrize("asked", ["launcher", "rank"])
def test_sigterm_is_passed_on_and_ranks_end_by_themselves(tmp_path, asked):
    launcher = start_node(program(tmp_path, SAVES), restarts=3)
    _wait_until(lambda: len(list(tmp_path.glob("*.waits"))) == 2)
    pid = launcher.pid if asked == "launcher" else int((tmp_path / "1.0.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == PREEMPTED, out + err
    assert "Traceback" not in err
    assert starts(tmp_path) == 1
    assert not any(map(_is_running, _pids(tmp_path)))


@pytest.mark.slow
@pytest.mark.world
def test_a_second_sigterm_ends_ranks_that_do_not(tmp_path):
    body = """
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (here / f"{rank}.asked").touch())
    (here / f"{rank}.waits").touch()
    while True:
        time.sleep(0.1)
    """
    launcher = start_node(program(tmp_path, body))
    _wait_until(lambda: len(list(tmp_path.glob("*.waits"))) == 2)
    launcher.send_signal(signal.SIGTERM)
    _wait_until(lambda: len(list(tmp_path.glob("*.asked"))) == 2)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert not any(map(_is_running, _pids(tmp_path)))


# ---- several nodes: launchers on one machine


def free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def two_nodes(folder, body, *, restarts=0):
    port, argv = free_port(), program(folder, body)
    options = {"num_nodes": 2, "port": port, "restarts": restarts}
    return [start_node(argv, node, **options) for node in (1, 0)][::-1]


@pytest.mark.world
def test_two_nodes_number_their_ranks_in_order_and_start_again_together(tmp_path):
    """A rank of one node is killed, then one of the other; both nodes count both."""
    body = """
    place = os.environ["GROUP_RANK"] + os.environ["LOCAL_RANK"]
    (here / f"{rank}.{attempt}.node").write_text(place)
    if attempt < 2:
        if str(attempt) == rank:
            os.kill(os.getpid(), 9)
        time.sleep(60)
    """
    nodes = two_nodes(tmp_path, body, restarts=2)
    said = [node.communicate(timeout=90) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "restart 1 of 2: rank 0 of 2 was killed by SIGKILL" in said[0][0]
    assert "restart 2 of 2: rank 1 of 2 was killed by SIGKILL" in said[1][0]
    places = {p.name: p.read_text() for p in tmp_path.glob("*.node")}
    assert places == {f"{r}.{a}.node": f"{r}0" for r in (0, 1) for a in (0, 1, 2)}


@pytest.mark.slow
@pytest.mark.world
def test_a_node_that_gives_up_ends_the_other_and_says_why(tmp_path):
    body = """
    if rank == "1":
        os.kill(os.getpid(), 9)
    time.sleep(60)
    """
    nodes = two_nodes(tmp_path, body)
    begin = time.monotonic()
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [1, 1], said
    assert time.monotonic() - begin < 45
    assert "error: rank 1 of 2 was killed by SIGKILL" in said[1]
    assert "error: another node ended the run: rank 1 of 2 was killed by SIGKILL" in said[0]
    assert not any(map(_is_running, _pids(tmp_path)))


@pytest.mark.slow
@pytest.mark.world
def test_nodes_that_were_started_differently_are_refused(tmp_path):
    port, argv = free_port(), program(tmp_path, "")
    nodes = [start_node(argv, 1, num_nodes=2, port=port) for _ in range(2)]
    nodes.append(start_node(argv, 0, num_nodes=2, port=port))
    _wait_until(lambda: nodes[2].poll() is not None or any(n.poll() for n in nodes[:2]), 60)
    for node in nodes:
        node.kill()
    errors = " ".join(node.communicate()[1] for node in nodes)
    assert re.search("--node-rank 1: another node has it|lost each other|another node", errors)


@pytest.mark.parametrize(
    ("parallel", "nodes", "gpus", "expected"),
    [
        ({"tp_size": 8, "dp_replicate_size": 2}, {"num_nodes": 2}, 8, (8, 8)),
        ({"tp_size": 4, "fsdp_size": 4}, {"num_nodes": 2}, 8, (8, 4)),
        ({"dp_replicate_size": 2}, {"num_nodes": 2}, 8, (8, 8)),
        ({"dp_replicate_size": 2}, {"num_nodes": 2}, 0, (1, 1)),
        ({"dp_replicate_size": 2}, {"num_nodes": 2, "processes_per_node": 2}, 0, (2, 2)),
    ],
)
def test_the_axes_are_shared_out_to_the_nodes(parallel, nodes, gpus, expected):
    asked = Nodes(endpoint="a:1", **nodes)
    found, axes = processes_of_node(ParallelTable(**parallel), asked, num_gpus=gpus)
    assert (found, axes.tp_size) == expected


@pytest.mark.parametrize(
    ("parallel", "nodes", "gpus", "message"),
    [
        (
            {"tp_size": 2},
            {"num_nodes": 2},
            0,
            "tp_size = 2: a node has 1 processes, and .* use",
        ),
        (
            {},
            {"num_nodes": 2},
            8,
            r"tp_size = 16: a node has 8 .* use tp_size 1, 2, 4, 8,",
        ),
        ({"tp_size": 3}, {"num_nodes": 2}, 0, "product is 3 processes, which 2 nodes cannot share"),
        (
            {"tp_size": 8, "fsdp_size": 2},
            {"num_nodes": 2},
            4,
            "each node = 8: this machine has 4",
        ),
        (
            {"tp_size": 2, "fsdp_size": 2},
            {"num_nodes": 2, "processes_per_node": 3},
            0,
            "fsdp_size 2 x tp_size 2 needs 4 processes, 6 were started",
        ),
    ],
)
def test_nodes_that_the_axes_do_not_fit_are_refused(parallel, nodes, gpus, message):
    with pytest.raises(LaunchError, match=message):
        processes_of_node(ParallelTable(**parallel), Nodes(endpoint="a:1", **nodes), num_gpus=gpus)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"num_nodes": 2, "node_rank": 2, "endpoint": "a:1"}, "--node-rank 2: there are 2 nodes"),
        ({"num_nodes": 2}, "--nnodes 2: needs --rdzv-endpoint HOST:PORT"),
        ({"endpoint": "a:1"}, "--rdzv-endpoint a:1: one node alone meets nobody"),
        ({"num_nodes": 2, "endpoint": "a:port"}, "--rdzv-endpoint a:port: needs HOST:PORT"),
    ],
)
def test_options_of_nodes_that_do_not_go_together_are_refused_by_name(nodes, message):
    with pytest.raises(LaunchError, match=message):
        Nodes(**nodes).check()
    Nodes(num_nodes=2, endpoint="[::1]:29400").check()
    assert Nodes(num_nodes=2, endpoint="host").port == 29400
    assert Nodes(num_nodes=2, endpoint="[::1]:29400").is_on_loopback
