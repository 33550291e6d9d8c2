"""Inits from all of W: the factors and the rest of W are those of one process, and so is the run.

What the init gives is compared bit for bit in float32, ten steps from there in float64.
"""

import contextlib
import json
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from peft.tuners.lora.config import LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.adapter.initial import (
    CASES,
    CHANGES_BASE,
    GRADIENT,
    INITS_ALONE,
    attach,
    attach_plain,
    preprocess,
    train_step,
)
from tests.merging import merge_one
from tests.models import (
    CUT,
    SEED,
    Case,
    batches,
    compare_run,
    differences,
    lora,
    record_run,
)
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter import initial
from tplora.adapter.attach import attach_adapter
from tplora.adapter.linear import TploraLinear
from tplora.artifact.verify import record_probe, verify_adapter
from tplora.base.load import load_base
from tplora.upstream import local_shard

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def path(alone, checkpoint):
    """A tiny llama, with the files that CorDA and LoRA-GA read."""
    path = checkpoint("llama_bias", **CUT)
    alone.run(preprocess, path)
    return path


# ---- what the init gives


def _equals_plain_peft(path, case, breaking=contextlib.nullcontext):
    with breaking():
        model = attach(path, lora(case.targets, **case.changes), dtype=torch.float32)
    plain = attach_plain(path, lora(case.targets, **case.changes), dtype=torch.float32)
    full = dict(plain.named_parameters())
    factors = model.factors()
    assert set(factors) == {name for name in full if "lora_" in name}
    for name, factor in factors.items():
        shard, dim = factor.parameter.detach(), factor.plan.shard_dim
        assert_is_shard(shard=shard, full=full[name].detach(), dim=dim, what=name, is_exact=True)
        assert factor.parameter.requires_grad == full[name].requires_grad, name
        if dim is None:
            assert_same_on_all_ranks(tensor=shard, what=name)
    for name, module in model.named_modules():
        if isinstance(module, TploraLinear):
            weight, dim = module.get_base_layer().weight.detach(), module.plan.weight.shard_dim
            whole = plain.get_submodule(name).get_base_layer().weight.detach()
            assert_is_shard(shard=weight, full=whole, dim=dim, what=name, is_exact=True)


@pytest.mark.parametrize("name", [*CASES, *INITS_ALONE])
def test_factors_and_base_are_bit_for_bit_those_of_plain_peft(world, path, name):
    world.run(_equals_plain_peft, path, (CASES | INITS_ALONE)[name])


def test_a_tied_head_keeps_its_weight_under_mica(world2, checkpoint):
    world2.run(_equals_plain_peft, checkpoint("qwen2_tied", **CUT), CASES["mica"])


def _equals_in_bfloat16(path, init):
    """As a bfloat16 base is adapted: the init in float32, its factors rounded, then float32."""
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.bfloat16)
    model = attach_adapter(base, lora(init_lora_weights=init), seed=SEED)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    torch.manual_seed(SEED)
    full = dict(get_peft_model(plain, lora(init_lora_weights=init)).named_parameters())
    for name, parameter in model.named_parameters():
        found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert_is_shard(
            shard=found.detach(), full=full[name].detach(), dim=None, what=name, is_exact=True
        )


def test_a_bfloat16_base_is_corrected_bit_for_bit(world2, path):
    world2.run(_equals_in_bfloat16, path, "pissa")


def _without_correction():
    """The base keeps W where it should keep what is left of it."""
    return mock.patch.object(initial, "_piece_like", lambda placed, whole: local_shard(placed))


def _with_pieces():
    """Each rank decomposes its own piece, over and over, as if it were all of W."""

    def repeated(placed):
        piece, sizes = local_shard(placed).detach(), placed.shape
        counts = [-(-size // own) for size, own in zip(sizes, piece.shape, strict=True)]
        return piece.repeat(*counts)[: sizes[0], : sizes[1]].contiguous()

    return mock.patch.object(initial, "gather_weight", repeated)


@pytest.mark.parametrize("breaking", [_without_correction, _with_pieces])
def test_parity_sees(world2, path, breaking):
    with pytest.raises(RankError, match=r"AssertionError: base_model.* is off by"):
        world2.run(_equals_plain_peft, path, CASES["pissa"], breaking)


def _most_whole_weights_at_once(path, case):
    live, most, gathered = set(), 0, []
    gather = initial.gather_weight

    def counted(placed):
        nonlocal most
        whole = gather(placed)
        live.add(id(whole))
        weakref.finalize(whole, live.discard, id(whole))
        most = max(most, len(live))
        gathered.append(tuple(whole.shape))
        return whole

    with mock.patch.object(initial, "gather_weight", counted):
        model = attach(path, lora(case.targets, **case.changes))
    layers = [module for module in model.modules() if isinstance(module, TploraLinear)]
    assert sorted(gathered) == sorted(layer.plan.weight.shape for layer in layers)
    is_keeper = dist.get_rank() == 0
    assert all((one.a is not None) == is_keeper for m in layers for one in m.initial.values())
    return most, len(live)


def test_no_rank_holds_more_than_one_whole_weight(world2, path):
    assert world2.run(_most_whole_weights_at_once, path, CASES["olora"]) == [(1, 0), (1, 0)]


def _own_gradients(path):
    """PEFT's preprocessing on the cut base itself: its gradients are pieces."""
    config = lora(**GRADIENT | {"lora_ga_config": LoraGAConfig()})
    config.target_modules = {"q_proj", "o_proj", "lm_head"}
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float32)
    preprocess_loraga(base, config, train_step(base))
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    preprocess_loraga(plain, config, train_step(plain))
    for name, module in plain.named_modules():
        if hasattr(module, "_peft_loraga_grad"):
            found = base.get_submodule(name)._peft_loraga_grad.full_tensor()
            torch.testing.assert_close(found, module._peft_loraga_grad, rtol=1e-4, atol=1e-6)
    model = attach_adapter(base, config, seed=1)
    assert all(m.initial for m in model.modules() if isinstance(m, TploraLinear))


def test_lora_ga_takes_gradients_of_the_cut_base(world2, path):
    world2.run(_own_gradients, path)


# ---- what is trained from there


@pytest.fixture(scope="module")
def recorded(alone, path, tmp_path_factory):
    """The file of the run alone by plain PEFT, made once for both worlds."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def get(name):
        if name not in files:
            files[name] = folder / f"{name}.safetensors"
            alone.run(_record, path, CASES[name], files[name])
        return files[name]

    return get


def _record(path, case, file):
    with mock.patch("tests.models.load_plain", attach_plain):
        record_run(path, case, file, is_plain=True)


def _compare(path, case, file):
    with mock.patch("tests.models.load", attach):
        compare_run(path, case, file)


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_plain_peft(world2, path, recorded, name):
    world2.run(_compare, path, CASES[name], recorded(name))


@pytest.mark.parametrize("name", ["pissa", "mica", "kasa"])
def test_ten_steps_over_three_ranks_equal_plain_peft(world_of, path, recorded, name):
    world_of(3).run(_compare, path, CASES[name], recorded(name))


def _broken(path, case, file):
    with mock.patch("tests.models.load", attach), _without_correction():
        return differences(path, case, file)


def test_a_run_on_an_uncorrected_base_is_seen(world2, path, recorded):
    found = world2.run(_broken, path, CASES["pissa"], recorded("pissa"))
    assert all(any("loss" in line for line in lines) for lines in found)


# ---- what is saved


def _train_and_save(path, case, folder):
    """Two steps; the folder gets the adapter, and a probe of what the model says."""
    model = attach(path, lora(case.targets, **case.changes), dtype=torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=True)
    for step in (1, 2):
        optimizer.zero_grad()
        model(**batches(step)[0]).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder / "adapter")
    rows = batches(3)[0]["input_ids"].tolist()
    record_probe(model, rows, folder / "probe.safetensors", is_writer=dist.get_rank() == 0)


@pytest.mark.parametrize("name", [*CASES, "pissa-dora"])
def test_plain_peft_reads_the_saved_adapter_on_the_original_base(world2, path, tmp_path, name):
    case = CASES.get(name) or Case(changes={"init_lora_weights": "pissa", "use_dora": True})
    world2.run(_train_and_save, path, case, tmp_path)
    args = (tmp_path / "adapter", path, tmp_path / "probe.safetensors")
    report = verify_adapter(*args, dtype=torch.float32, tolerance=1e-5)
    assert report.passed, report
    assert report.max_effect > 1e3 * report.max_abs_diff
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    is_widened = name in CHANGES_BASE and name != "kasa"
    assert (config["init_lora_weights"] is True) == (is_widened or name in ("kasa", "pissa-dora"))
    assert config["r"] == (8 if is_widened or name == "pissa-dora" else 4)


def test_the_saved_adapter_merges_file_by_file(world2, path, tmp_path):
    world2.run(_train_and_save, path, CASES["pissa"], tmp_path)
    merge_one(path, tmp_path / "adapter", tmp_path / "merged")
    rows = batches(4)[0]["input_ids"]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    with torch.no_grad():
        difference = merged(rows).logits - loaded(rows).logits
    assert float(difference.abs().max()) < 1e-6


def _save_as_trained(path, case, folder):
    @contextlib.contextmanager
    def as_trained(model, factors):
        model.peft_config["default"].init_lora_weights = True
        yield dict(factors)

    with mock.patch("tplora.adapter.save.for_loaded_base", as_trained):
        _train_and_save(path, case, folder)


def test_an_adapter_saved_as_trained_is_seen(world2, path, tmp_path):
    world2.run(_save_as_trained, path, CASES["pissa"], tmp_path)
    args = (tmp_path / "adapter", path, tmp_path / "probe.safetensors")
    assert not verify_adapter(*args, dtype=torch.float32).passed
