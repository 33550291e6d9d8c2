"""accelerate's config from how the model is cut."""

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from tests.models import CUT, load, lora, world_size
from tplora.train.parallelism import parallelism_config
from tplora.upstream import CpuParallelismConfig

pytestmark = pytest.mark.world


def _config(path):
    model = load(path, lora())
    own, bases = parallelism_config(model), parallelism_config(model.get_base_model())
    assert (own is None) == (bases is None) == (world_size() == 1)
    return own and {"tp": own.tp_size, "total": own.total_size, "of base": bases.tp_size}


def test_a_model_cut_over_the_world_is_one_tensor_parallel_group(world, checkpoint):
    found = world.run(_config, checkpoint("llama", **CUT))
    assert found == [dict.fromkeys(("tp", "total", "of base"), world.size)] * world.size


def test_a_whole_model_needs_none(alone, checkpoint):
    assert alone.run(_config, checkpoint("llama", **CUT)) == [None]


def _refused():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    with pytest.raises((ValueError, RuntimeError), match="3"):
        Accelerator(cpu=True, parallelism_config=CpuParallelismConfig(tp_size=3))


def test_a_config_for_another_number_of_processes_is_still_refused(world2):
    world2.run(_refused)
