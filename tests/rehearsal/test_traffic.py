"""Bytes and collectives of a step on each axis, over 1 to 4 processes: predicted is measured."""

from dataclasses import replace
from io import StringIO

import pytest
import torch.distributed as dist
from rich.console import Console
from transformers import AutoConfig

from tests.rehearsal.measure import RealStep
from tests.rehearsal.models import lora, write_model
from tests.scaling_table import BATCH, MESHES, PAGE, predict, rows_of
from tplora.plan.axes import Axes
from tplora.plan.axes_cost import bucket_bytes
from tplora.plan.build import build_plan
from tplora.plan.report import render_plan
from tplora.plan.step_report import peak_bytes, step_facts
from tplora.plan.traffic import gathered_bytes, step_traffic
from tplora.rehearsal.step import rehearse

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("traffic") / "llama")


def _measured(path, axes, batch=BATCH):
    """Count and bytes of each axis on this rank, gathered weights in full."""
    sizes = {"fsdp_size": axes.fsdp_size, "dp_replicate_size": axes.dp_replicate_size}
    real = RealStep(path, lora(), batch, tp_size=axes.tp_size, **sizes)
    forward, backward, bucket = real.calls()
    gathers = [n for kind, n in (*forward, *backward) if "base" in kind]
    activations = [[n for kind, n in part if "base" not in kind] for part in (forward, backward)]
    return {
        "forward": (len(activations[0]), sum(activations[0])),
        "backward": (len(activations[1]), sum(activations[1])),
        "buckets": sorted(n for _, n in bucket),
        "base": (len(gathers), axes.fsdp_size * sum(gathers)),
    }


def _predicted(path, axes, batch=BATCH):
    return predict(AutoConfig.from_pretrained(path), lora(), batch, axes.tp_size)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_each_axis_carries_what_was_predicted(world_of, path, axes):
    traffic = _assert_predicted(world_of, path, axes, BATCH)
    assert "\n".join(rows_of(axes, traffic)) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("axes", [Axes(tp_size=2), Axes(tp_size=1, fsdp_size=2)], ids=str)
def test_passes_of_a_reference_are_carried_too(world_of, path, axes):
    batch = replace(BATCH, passes_before=1, reference_passes=2)
    _assert_predicted(world_of, path, axes, batch)


def _assert_predicted(world_of, path, axes, batch):
    plan, cost = _predicted(path, axes, batch)
    found = world_of(axes.world_size).run(_measured, path, axes, batch)[0]
    traffic = step_traffic(plan, axes, cost, num_micro_batches=1)
    said = {one.what: (one.count, one.num_bytes) for one in traffic}
    for what in ("forward", "backward"):
        assert said.get(what, (0, 0)) == found[what]
    buckets = sorted(one.num_bytes for one in traffic if one.what == "gradients of factors")
    assert buckets == found["buckets"] == sorted(bucket_bytes(plan, axes).values())
    if axes.fsdp_size > 1:
        assert said["the base"] == found["base"]
    assert not dist.is_initialized()
    return traffic


def test_the_table_of_eight_by_eight_gpus_is_printed_from_the_plan(path):
    axes = Axes(tp_size=4, fsdp_size=16)
    plan, cost = _predicted(path, axes)
    facts = dict(step_facts(plan, axes, cost, num_micro_batches=3))
    assert "the base" in facts["bytes and collectives"]
    assert "over the fsdp axis" in facts["bytes and collectives"]
    assert "of it gathered" in facts["memory per rank"]
    three = step_traffic(plan, axes, cost, num_micro_batches=3)
    one = step_traffic(plan, axes, cost, num_micro_batches=1)
    ratios = {a.what: a.num_bytes / b.num_bytes for a, b in zip(three, one, strict=True)}
    assert ratios == {"forward": 3, "backward": 3, "gradients of factors": 1, "the base": 3}


def test_sharing_the_base_out_lowers_the_peak_by_what_is_not_gathered(path):
    plan, cost = _predicted(path, Axes(tp_size=1))
    alone, shared = (peak_bytes(plan, Axes(tp_size=1, fsdp_size=n), cost) for n in (1, 64))
    assert cost.peak - cost.weights < shared < alone + cost.weights
    assert alone == cost.peak
    assert gathered_bytes(plan, 64) > cost.weights


def test_experts_are_counted_once_a_step_was_run_through(tmp_path):
    path = write_model("qwen3_moe", tmp_path / "moe")
    config = AutoConfig.from_pretrained(path)
    plan, axes = build_plan(config, lora(), tp_size=2), Axes(tp_size=2)
    facts = step_facts(plan, axes, rehearse(plan, config, lora(), BATCH), num_micro_batches=1)
    assert "not counted" in _shown(render_plan(plan, axes))
    assert "not counted" not in _shown(render_plan(plan, axes, facts))
    assert "bytes and collectives" in _shown(render_plan(plan, axes, facts))


def _shown(table):
    console = Console(width=100, file=StringIO())
    console.print(table)
    return console.file.getvalue()
