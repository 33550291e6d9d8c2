"""A run of one process, which has no launcher and no group: SIGTERM reaches it, too."""

import random
import signal

import pytest

from tests.faults.commands import ends, start
from tests.faults.running import assert_ended_like, assert_nothing_is_half
from tests.run.test_finetune import wait_for

pytestmark = pytest.mark.world

ONE = ("--set", "parallel.tp_size=1")


@pytest.fixture(scope="module")
def alone_whole(place):
    run = place / "alone"
    ends(start(place, "--output", str(run), *ONE, is_forked=True), 0)
    return run


def test_sigterm_saves_its_step_and_the_same_command_goes_on(place, alone_whole, tmp_path, seed):
    run = tmp_path / "run"
    command = ("--output", str(run), "--resume-or-start", *ONE)
    process = start(place, *command, is_forked=True)
    wait_for(run / "metrics.jsonl", text=f'"step": {random.Random(seed).randint(1, 2)}')
    process.send_signal(signal.SIGTERM)
    said = ends(process, 75)
    assert "stopped by SIGTERM after step" in said
    assert_nothing_is_half(run)
    ends(start(place, *command, is_forked=True), 0)
    assert_ended_like(run, alone_whole)
