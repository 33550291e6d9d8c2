"""All three axes at once: eight processes train what one does."""

import pytest

from tests.axes.running import Mesh, assert_same, run_on
from tests.models import CUT
from tests.train.training import Setup

pytestmark = [pytest.mark.world, pytest.mark.slow]

EIGHT = Mesh(tp_size=2, fsdp_size=2, dp_replicate_size=2)
SETUP = Setup(batch_size=4, eval_batch_size=4, accumulation=2, max_steps=6, has_eval=True)
"""17 rows, 8 a step: the third step of an epoch has one row, and three data ranks have none."""


def test_copies_of_shards_of_a_cut_model_train_as_one_process(
    world_of, alone, checkpoint, tmp_path
):
    path = checkpoint("llama", **CUT)
    wanted = alone.run(run_on, Mesh(), path, tmp_path / "alone", SETUP)[0]
    found = world_of(8).run(run_on, EIGHT, path, tmp_path / "eight", SETUP)
    for results in found:
        assert_same(results, wanted)
