"""What a plan says of data axes, and how many bytes really go over them."""

import pytest
import torch.distributed as dist

from tests.adapter.models import tokens
from tests.axes.running import Mesh, load_on
from tests.communication import Recorded
from tests.models import CUT, load, lora
from tplora.plan.axes import Axes
from tplora.plan.axes_cost import axes_facts, bucket_bytes
from tplora.plan.cost import base_bytes
from tplora.upstream import local_shard

pytestmark = pytest.mark.world

SHARDED = Mesh(tp_size=2, fsdp_size=2)


def _said(path):
    plan = load(path, lora()).plan
    axes = Axes(tp_size=1, fsdp_size=2, dp_replicate_size=4)
    return axes_facts(plan, Axes(tp_size=1)), axes_facts(plan, axes), bucket_bytes(plan, axes)


def test_a_plan_says_processes_and_bytes_where_there_are_data_axes(alone, checkpoint):
    (nothing, facts, sent) = alone.run(_said, checkpoint("llama", **CUT))[0]
    assert nothing == []
    said = dict(facts)
    assert said["processes"] == (
        "8: dp_replicate_size 4 x fsdp_size 2 x tp_size 1, tp ranks next to each other"
    )
    assert list(sent) == ["world"], "nothing is cut at tp_size 1"
    assert f"{sent['world']:,} bytes over all processes" in said["over data axes"]


def _bytes(path):
    model = load_on(SHARDED, path, lora())
    held = sum(local_shard(p).nbytes for p in model.parameters() if not p.requires_grad)
    rows = tokens()
    with Recorded() as sent:
        model(input_ids=rows, labels=rows).loss.backward()
    gathered = sum(
        n * dist.get_world_size(model.data.group) for kind, n in sent.calls if "base" in kind
    )
    return held, gathered, base_bytes(model.plan, 0, bytes_per_element=8)


def test_a_sharded_base_is_held_and_gathered_as_the_plan_says(world4, checkpoint):
    """A part of what is gathered twice at most is norm and head, gathered once."""
    for held, gathered, base in world4.run(_bytes, checkpoint("llama", **CUT)):
        assert held == pytest.approx(base / 2, rel=0.02), "a vocabulary of 127 is padded"
        assert 1.8 * base < gathered <= 2 * base
