"""Each field of a ``LoraConfig`` means under tensor parallelism what it means in one process."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.adapter.options import DROPPED, OPTIONS
from tests.models import CUT, batches, compare_run, differences, load, lora, record_run
from tests.test_parity import _plain_logits
from tplora.adapter.linear import TploraLinear
from tplora.adapter.variants.dora import LinearDora

pytestmark = pytest.mark.world
SIZES = CUT | {"intermediate_size": 48}  # blocks have to divide it


@pytest.fixture(scope="module")
def recorded(alone, checkpoint, tmp_path_factory):
    """The checkpoint's path and the file of the run alone, by plain PEFT if nothing is dropped."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def get(name, case):
        path, key = checkpoint(name, **SIZES), (name, repr(case))
        if key not in files:
            files[key] = folder / f"{len(files)}.safetensors"
            alone.run(_record, path, case, files[key])
        return path, files[key]

    return get


def _record(path, case, file):
    record_run(path, case, file, is_plain=case.dropout == 0)


def _compare(path, case, file):
    compare_run(path, case, file)


@pytest.mark.parametrize("name", OPTIONS)
def test_ten_steps_equal_plain_peft(world, recorded, name):
    model, case = OPTIONS[name]
    path, file = recorded(model, case)
    world.run(_compare, path, case, file)


@pytest.mark.parametrize("name", DROPPED)
def test_ten_steps_with_dropout_equal_one_process(world, recorded, name):
    model, case = DROPPED[name]
    path, file = recorded(model, case)
    world.run(_compare, path, case, file)


def _save(path, case, folder):
    model = load(path, lora(case.targets, **case.changes))
    generator = torch.Generator().manual_seed(5)
    for factor in model.factors().values():  # far from where they start
        full = torch.randn(factor.plan.shape, generator=generator, dtype=torch.float64) / 4
        factor.parameter.data.copy_(factor.piece_of(full))
    model.save_pretrained(folder)
    return model.eval()(**batches(1)[0]).logits.detach().numpy()


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_peft_reads_the_saved_adapter(world2, alone, checkpoint, tmp_path, name):
    model, case = OPTIONS[name]
    path = checkpoint(model, **SIZES)
    logits = world2.run(_save, path, case, tmp_path)[0]
    again = alone.run(_plain_logits, path, tmp_path)[0]
    assert abs(again - logits).max() < 1e-6
    assert all(t.numel() for t in load_file(tmp_path / "adapter_model.safetensors").values())


def _merged_and_back(path, case, is_safe):
    model = load(path, lora(case.targets, **case.changes | {"init_lora_weights": False})).eval()
    batch = {key: value for key, value in batches(1)[0].items() if key != "labels"}
    with torch.no_grad():
        apart = model(**batch).logits
        model.merge_adapter(safe_merge=is_safe)
        merged = model(**batch).logits
        model.unmerge_adapter()
        back = model(**batch).logits
    return [float((one - apart).abs().max()) for one in (merged, back)]


@pytest.mark.parametrize("is_safe", [True, False], ids=["safe", "in-place"])
@pytest.mark.parametrize("name", ["patterns", "dora", "dora-ends", "lora-bias", "blocks"])
def test_a_live_merge_changes_no_logits_and_can_be_undone(world2, checkpoint, name, is_safe):
    model, case = OPTIONS[name]
    for off in world2.run(_merged_and_back, checkpoint(model, **SIZES), case, is_safe):
        assert max(off) < 1e-5


def _broken(path, case, file):
    with mock.patch.object(dist, "all_reduce", _only_full_ones(dist.all_reduce)):
        return differences(path, case, file)


def _only_full_ones(all_reduce):
    """An all-reduce that leaves vectors as they are, such as the norms of rows."""

    def reduce(tensor, *args, **kwargs):
        return (
            None
            if tensor.ndim == 1 and tensor.numel() == 24
            else all_reduce(tensor, *args, **kwargs)
        )

    return reduce


def test_parity_sees_a_norm_over_a_shard(world2, recorded):
    model, case = OPTIONS["dora"]
    path, file = recorded(model, case)
    found = world2.run(_broken, path, case, file)
    assert any("magnitude" in line or "loss" in line for lines in found for line in lines), found


def test_dora_says_what_it_is(checkpoint):
    model = load(checkpoint("llama", **SIZES), lora(use_dora=True))
    layers = [m for m in model.modules() if isinstance(m, TploraLinear)]
    variants = {type(layer.lora_variant["default"]) for layer in layers}
    assert variants == {LinearDora}
