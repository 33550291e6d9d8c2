"""A run whose init changed the base is resumed on a base that the same init changes again."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.adapter.initial import attach
from tests.models import CUT, lora
from tests.train.test_checkpoint import SETUP, _assert_same, _run
from tests.world import RankError
from tplora.adapter.original import PROBES

pytestmark = pytest.mark.world


def _attach(path, config):
    """The trainer's own config, with an init that draws as well as decomposes."""
    config.init_lora_weights = "pissa_niter_2"
    return attach(path, config)


def _run_pissa(path, folder, resumed=None):
    return _run(path, folder, SETUP, resumed, load=_attach)


@pytest.fixture(scope="module")
def whole(world2, checkpoint, tmp_path_factory):
    """The uninterrupted run, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return world2.run(_run_pissa, checkpoint("llama", **CUT), folder)[0], folder


def test_three_and_three_steps_are_six(world2, whole, checkpoint, tmp_path):
    wanted, folder = whole
    resumed = folder / "checkpoint-3"
    for found in world2.run(_run_pissa, checkpoint("llama", **CUT), tmp_path, resumed):
        _assert_same(found, wanted, is_exact=True)
    for file in ("optimizer.pt", "adapter_model.safetensors", PROBES):
        again = (tmp_path / "checkpoint-6" / file).read_bytes()
        assert again == (folder / "checkpoint-6" / file).read_bytes(), file


def test_it_resumes_at_another_tp_size(world_of, whole, checkpoint, tmp_path):
    wanted, folder = whole
    args = (checkpoint("llama", **CUT), tmp_path, folder / "checkpoint-3")
    for size in (1, 3):
        for found in world_of(size).run(_run_pissa, *args):
            _assert_same(found, wanted)


def test_a_checkpoint_keeps_the_factors_of_the_optimizers_state(whole):
    folder = whole[1] / "checkpoint-3"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["init_lora_weights"], config["r"]) == ("pissa_niter_2", lora().r)
    factors = load_file(folder / "adapter_model.safetensors")
    probes = load_file(folder / PROBES)
    assert set(probes) == {name for name in factors if "lora_A" in name}


def test_another_rest_of_the_base_is_refused_by_name(world2, whole, checkpoint, tmp_path):
    """As a checkpoint of another seed would be; factors alone do not show it."""
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    for file in (whole[1] / "checkpoint-3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    probes = load_file(folder / PROBES)
    name = sorted(probes)[5]
    save_file(probes | {name: probes[name] * 1.01}, folder / PROBES)
    with pytest.raises(RankError, match=r"ArtifactError: .*attach with the seed"):
        world2.run(_run_pissa, checkpoint("llama", **CUT), tmp_path / "run", folder)
