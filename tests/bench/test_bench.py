"""`tplora bench` times the recipe's own steps; its numbers are what they are called."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from tests.run.test_finetune import RECIPE, place, tplora
from tests.tiny import tiny_config
from tests.zoo.build import tiny_config as zoo_config
from tplora.adapter.attach import attach_adapter
from tplora.bench.devices import PEAK_FLOPS, peak_flops
from tplora.bench.flops import step_flops
from tplora.bench.result import BenchResult
from tplora.bench.timing import collective_seconds
from tplora.plan.build import build_plan
from tplora.upstream import build_meta_model

__all__ = ["place"]


@pytest.mark.world
@pytest.mark.slow
def test_a_recipe_is_timed_and_nothing_of_it_is_kept(place):
    before = sorted(path.name for path in place.iterdir())
    (place / "bench.toml").write_text(RECIPE)
    done = tplora(
        place, "bench", "bench.toml", "--steps", "3", "--warmup", "1", "--json", "found.json"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for name in ("tokens/s", "step, of 3", "in collectives", "peak memory", "model FLOPs"):
        assert name in done.stdout
    assert "USDT" not in done.stderr
    found = json.loads((place / "found.json").read_text())
    assert len(found["step_seconds"]) == len(found["step_tokens"]) == 3
    assert 0 < found["collective_share"] < 1
    assert found["axes"] == "tp_size 2"
    assert found["utilisation"] is None, "of a CPU nothing is known"
    after = sorted(path.name for path in place.iterdir())
    assert set(after) - set(before) == {"bench.toml", "found.json"}


@pytest.mark.slow
@pytest.mark.world
def test_one_process_has_no_collectives_and_the_same_tokens(place):
    (place / "bench.toml").write_text(RECIPE)
    tokens = []
    for tp_size in (1, 2):
        done = tplora(
            place, "bench", "bench.toml", "--steps", "2", "--warmup", "0", "--json", "one.json",
            "--set", f"parallel.tp_size={tp_size}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        found = json.loads((place / "one.json").read_text())
        tokens.append(found["step_tokens"])
        assert (found["collective_share"] is None) == (tp_size == 1)
    assert tokens[0] == tokens[1]


def _result(**changes):
    settings = {
        "recipe": "r",
        "axes": "tp_size 1",
        "device": "CPU",
        "dtype": "float32",
        "step_seconds": (4.0, 1.0, 2.0, 3.0, 10.0),
        "step_tokens": (10.0, 10.0, 10.0, 10.0, 10.0),
        "collective_share": None,
        "peak_bytes": 1 << 30,
        "peak_kind": "resident",
        "flops_per_step": 8e12,
        "device_flops": None,
        "versions": {},
    }
    return BenchResult(**settings | changes)


def test_percentiles_are_steps_that_were_taken():
    result = _result()
    assert [result.percentile(p) for p in (50, 80, 90, 100)] == [3.0, 4.0, 10.0, 10.0]
    assert result.tokens_per_s == 2.5


def test_utilisation_is_of_what_the_devices_can():
    assert _result(device_flops=4e12).utilisation == pytest.approx(0.5)
    assert "50 %" in dict(_result(device_flops=4e12).rows())["model FLOPs"]
    assert "not in the table" in dict(_result().rows())["model FLOPs"]


def _event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))


def test_collectives_under_way_at_once_are_counted_once():
    events = [
        _event("gloo:all_reduce", 0, 10),
        _event("gloo:all_gather", 5, 20),
        _event("aten::mm", 0, 100),
        _event("ncclDevKernel_AllReduce_Sum_bf16", 40, 45),
        _event("gloo:all_reduce", 7, 9),
    ]
    assert collective_seconds(events) == pytest.approx(25e-6)
    assert collective_seconds([]) == 0


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA L4", "bfloat16", 121e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA A1000", "bfloat16", None),
        ("CPU", "bfloat16", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name, dtype, peak):
    assert peak_flops(name, dtype) == peak
    assert all(source for _, _, source in PEAK_FLOPS)


def test_operations_of_a_step_are_those_that_torch_counts():
    """Attention's formula on meta tensors counts both sides of the diagonal: it is left out."""
    config, adapter = tiny_config("llama"), LoraConfig(r=4, target_modules="all-linear")
    plan = build_plan(config, adapter, tp_size=1, dtype="float32")
    model = build_meta_model(config, trust_remote_code=False).requires_grad_(False)
    model = attach_adapter(model, adapter, plan=plan)
    model.enable_input_require_grads()  # so that every layer has a gradient of its input
    rows = torch.zeros((2, 16), dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counted:
        model(input_ids=rows).logits.sum().backward()  # a loss computes its chunks twice
    found = _products(counted) - 12 * _attention_products(config, rows)
    wanted = step_flops(plan, config, num_tokens=rows.numel(), length=0)
    assert found == pytest.approx(wanted, rel=0.01)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        _ = model(input_ids=rows).logits
    found = _products(counted) - 4 * _attention_products(config, rows)
    beside = step_flops(plan, config, num_tokens=rows.numel(), length=0, num_passes=1) - wanted
    assert found == pytest.approx(beside, rel=0.01), "a pass that nothing is learned from"


def _products(counted):
    counts = counted.get_flop_counts()["Global"]
    return sum(number for op, number in counts.items() if "mm" in str(op))


def _attention_products(config, rows):
    heads, size = config.num_attention_heads, config.head_dim
    return config.num_hidden_layers * rows.numel() * rows.shape[1] * heads * size


def test_of_experts_those_count_that_a_token_meets():
    config = zoo_config("qwen3_moe")
    plan = build_plan(config, LoraConfig(target_modules=["q_proj"]), tp_size=1)
    all_met = zoo_config("qwen3_moe")
    all_met.num_experts_per_tok = all_met.num_experts
    some, every = (step_flops(plan, one, num_tokens=1, length=0) for one in (config, all_met))
    experts = sum(parameter.numel for parameter in plan.facts.with_role("experts"))
    left_out = 1 - config.num_experts_per_tok / config.num_experts
    assert every - some == pytest.approx(4 * experts * left_out)
