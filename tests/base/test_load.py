"""A loaded base is the frozen piece that the plan says, or it is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.adapter.models import tokens
from tests.parity import assert_is_shard
from tests.tiny import NAMES
from tplora.base.load import check_shards, load_base
from tplora.errors import ShardError
from tplora.plan.build import Plan, build_plan
from tplora.upstream import tp_mesh

pytestmark = pytest.mark.world


def _load(path: str, **settings: Any) -> Any:
    return load_base(path, tp_size=dist.get_world_size(), dtype=torch.float64, **settings)


def _plan(model: Any, tp_size: int) -> Plan:
    targets = [
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    ]
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=sorted(set(targets)))
    return build_plan(model.config, lora, tp_size=tp_size)


def _pieces(path: str) -> None:
    model = _load(path)
    full = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    plan = _plan(model, dist.get_world_size())
    check_shards(model, plan)
    wanted = dict(full.named_parameters())
    wanted.setdefault("lm_head.weight", wanted["model.embed_tokens.weight"])  # tied
    for layer in plan.layers:
        weight = model.get_submodule(layer.name).weight
        assert_is_shard(
            shard=weight.detach(),
            full=wanted[f"{layer.name}.weight"].detach(),
            dim=layer.weight.shard_dim,
            what=layer.name,
            is_exact=True,
        )
    assert not [name for name, p in model.named_parameters() if p.requires_grad], "frozen"
    found, logits = (one(input_ids=tokens()).logits.detach() for one in (model, full))
    assert_is_shard(shard=found, full=logits, dim=None, what="logits", atol=1e-11)


@pytest.mark.parametrize("name", NAMES)
def test_each_rank_holds_its_planned_pieces_frozen(world, checkpoint, name):
    world.run(_pieces, checkpoint(name))


def _odd_split_is_uneven(path: str) -> int:
    head = _load(path).lm_head.weight
    assert isinstance(head, DTensor)
    return head.to_local().shape[0]


def test_a_vocabulary_of_127_leaves_the_last_rank_a_shorter_piece(world, checkpoint):
    wanted = {2: [64, 63], 3: [43, 43, 41]}[world.size]
    assert world.run(_odd_split_is_uneven, checkpoint("llama")) == wanted


def _one_process(path: str) -> None:
    model = load_base(path, tp_size=1, device=torch.device("cpu"), dtype=torch.float64)
    assert tp_mesh(model) is None
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert not any(p.requires_grad for p in model.parameters())
    check_shards(model, _plan(model, 1))


def test_one_process_loads_plainly(alone, checkpoint):
    alone.run(_one_process, checkpoint("llama"))


def _device_map(path: str) -> None:
    with pytest.raises(ShardError, match=r"device_map = 'auto': .*leave device_map out"):
        load_base(path, tp_size=2, device_map="auto")


def test_a_device_map_is_refused(alone, checkpoint):
    alone.run(_device_map, checkpoint("llama"))


def _other_plan(path: str) -> None:
    model = _load(path)
    plan = _plan(model, dist.get_world_size())
    layer = model.model.layers[1].mlp.up_proj
    right = layer.weight

    wrong = r"layers\.1\.mlp\.up_proj\.weight: this rank holds .*cut on dim 0, style colwise"
    layer.weight = nn.Parameter(right.full_tensor(), requires_grad=False)
    with pytest.raises(ShardError, match=wrong):
        check_shards(model, plan)
    rows = right.redistribute(right.device_mesh, [torch.distributed.tensor.Shard(1)])
    layer.weight = nn.Parameter(rows, requires_grad=False)
    with pytest.raises(ShardError, match=wrong):
        check_shards(model, plan)
    layer.weight = right
    check_shards(model, plan)

    whole = _plan(model, 1)
    with pytest.raises(ShardError, match=r"the plan says .*whole"):
        check_shards(model, whole)


def test_a_weight_that_is_not_the_planned_piece_is_named(world2, checkpoint):
    world2.run(_other_plan, checkpoint("llama"))


def _wrong_size(path: str) -> None:
    with pytest.raises(Exception, match=r"(?i)tp_size|world|size|devices"):
        load_base(path, tp_size=dist.get_world_size() + 1, dtype=torch.float64)


def test_a_tp_size_that_is_not_the_worlds_is_an_error(world2, checkpoint):
    world2.run(_wrong_size, checkpoint("llama"))
