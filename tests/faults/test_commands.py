"""Whole commands, as a person or a scheduler starts them: real launchers, real ranks, real signals.

Slow: each rank imports everything. What they show beyond ``test_faults.py`` is that the parts meet.
Repeated (``TPLORA_FAULT_REPEATS``), all but the first are forked, with the imports made.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.commands import TORCHRUN, ends, ranks_of, start
from tests.faults.conftest import REPEATS
from tests.faults.running import assert_ended_like, assert_nothing_is_half
from tests.launch.test_launcher import _is_running
from tests.launch.test_restarts import free_port
from tests.run.test_finetune import wait_for

pytestmark = [pytest.mark.world, pytest.mark.slow]


def test_a_killed_rank_is_named_and_the_run_goes_on_by_itself(place, whole, tmp_path, seed):
    """At a random moment after the first checkpoint; then all ranks are new processes."""
    run, chance = tmp_path / "run", random.Random(seed)
    command = ("--output", str(run), "--max-restarts", "1")
    launcher = start(place, *command, is_forked=seed > 0)
    wait_for(run / "checkpoint-2" / "trainer_state.json", text="global_step")
    time.sleep(chance.uniform(0, 0.3))
    first = ranks_of(launcher)
    rank = chance.randrange(2)
    os.kill(first[rank], signal.SIGKILL)
    said = ends(launcher, 0)
    assert f"restart 1 of 1: rank {rank} of 2 was killed by SIGKILL" in said
    assert "resumed from" in said
    assert not any(map(_is_running, first))
    assert_nothing_is_half(run)
    assert "restart 1 of 1" in (run / "log.txt").read_text()
    for name in ("logs",):
        (run / name).rename(tmp_path / name)
    assert_ended_like(run, whole)


@pytest.mark.parametrize("to", ["launcher", "rank", "torchrun"])
def test_sigterm_leaves_a_checkpoint_and_the_same_command_goes_on(place, whole, tmp_path, to, seed):
    run, chance = tmp_path / "run", random.Random(seed)
    command, how = ("--output", str(run), "--resume-or-start"), {"is_forked": seed > 0}
    launcher = start(place, *command, program=TORCHRUN if to == "torchrun" else (), **how)
    wait_for(run / "metrics.jsonl", text=f'"step": {chance.randint(1, 2)}')
    ranks = ranks_of(launcher)
    os.kill(ranks[chance.randrange(2)] if to == "rank" else launcher.pid, signal.SIGTERM)
    said = ends(launcher, None if to == "torchrun" else 75)
    assert launcher.returncode != 0
    assert "stopped by SIGTERM after step" in said
    assert not any(map(_is_running, ranks))
    assert_nothing_is_half(run)
    ends(start(place, *command, **how), 0)
    complete = ends(start(place, *command, **how), 0)
    assert "this run is complete" in complete
    if (run / "logs").exists():
        (run / "logs").rename(tmp_path / "logs")
    assert_ended_like(run, whole)


def start_nodes(place: Path, run: Path, *argv: str, is_forked: bool):
    endpoint = f"127.0.0.1:{free_port()}"
    command = (
        "--output", str(run), "--set", "parallel.tp_size=1", "--set",
        "parallel.dp_replicate_size=2", "--set", "train.per_device_train_batch_size=1",
        "--nnodes", "2", "--rdzv-endpoint", endpoint, *argv,
    )  # fmt: skip
    return [
        start(place, *command, "--node-rank", str(node), is_forked=is_forked) for node in (0, 1)
    ]


@pytest.fixture(scope="module")
def over_data(place):
    """The run of one launcher with two data ranks."""
    run = place / "data"
    argv = ("--set", "parallel.tp_size=1", "--set", "parallel.dp_replicate_size=2", "--set",
            "train.per_device_train_batch_size=1")  # fmt: skip
    ends(start(place, "--output", str(run), *argv, is_forked=REPEATS > 1), 0)
    return run


def test_two_launchers_give_the_run_of_one(place, over_data, tmp_path, seed):
    nodes = start_nodes(place, tmp_path / "run", is_forked=seed > 0)
    said = [ends(node, 0) for node in nodes]
    assert "step 6/6" in said[0]
    assert "step 1/6" not in said[1], "the first rank is on node 0"
    assert_ended_like(tmp_path / "run", over_data)


def test_two_launchers_go_on_together_when_one_loses_a_rank(place, over_data, tmp_path, seed):
    run = tmp_path / "run"
    nodes = start_nodes(place, run, "--max-restarts", "2", is_forked=seed > 0)
    wait_for(run / "checkpoint-2" / "trainer_state.json", text="global_step")
    os.kill(ranks_of(nodes[1])[0], signal.SIGKILL)
    said = [ends(node, 0) for node in nodes]
    assert "restart 1 of 2: rank 1 of 2 was killed by SIGKILL" in said[1]
    assert "resumed from" in said[0]
    assert_ended_like(run, over_data)


def test_sigterm_to_one_node_ends_both_at_one_step(place, over_data, tmp_path, seed):
    run = tmp_path / "run"
    nodes = start_nodes(place, run, "--resume-or-start", is_forked=seed > 0)
    wait_for(run / "metrics.jsonl", text='"step": 1')
    nodes[1].send_signal(signal.SIGTERM)
    said = [ends(node, 75) for node in nodes]
    assert "stopped by SIGTERM after step" in said[0]
    for node in start_nodes(place, run, "--resume-or-start", is_forked=seed > 0):
        ends(node, 0)
    assert_ended_like(run, over_data)
