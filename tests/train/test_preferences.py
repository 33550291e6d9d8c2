"""DPO and KTO: on every mesh a training is trl's own over plain PEFT in one process."""

import pytest

from tests.axes.running import Mesh, assert_same
from tests.train.preferences import SIZES, Preferring, run_on, run_plain

pytestmark = pytest.mark.world

DPO = Preferring(has_eval=True)
MESHES = [
    Mesh(tp_size=2),
    Mesh(tp_size=3),
    Mesh(fsdp_size=2),
    Mesh(tp_size=2, dp_replicate_size=2),
]


@pytest.fixture(scope="module")
def plain(alone, checkpoint, tmp_path_factory):
    """What trl's own trainer finds for a setup in one process, computed once."""
    found = {}

    def get(setup):
        if setup not in found:
            folder = tmp_path_factory.mktemp("plain")
            found[setup] = alone.run(run_plain, checkpoint("llama", **SIZES), folder, setup)[0]
        return found[setup]

    return get


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ten_steps_of_dpo_are_those_of_trl_and_plain_peft(
    world_of, plain, checkpoint, tmp_path, mesh
):
    """Losses, rewards, norms, evaluations, tokens and factors, over short last batches."""
    wanted = plain(DPO)
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen"} <= wanted[0][0].keys()
    path = checkpoint("llama", **SIZES)
    for found in world_of(mesh.world_size).run(run_on, mesh, path, tmp_path, DPO):
        assert_same(found, wanted, but=("num_input_tokens_seen",))
        assert found[2] == wanted[2] * mesh.tp_size, "transformers counts the ranks of a tp group"
