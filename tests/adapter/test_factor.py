"""A factor's leaf is its parameter's storage, also after somebody replaced it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.adapter.models import load_plain, load_tplora, tokens
from tests.models import InDouble
from tests.parity import assert_is_shard
from tplora.adapter.factor import Factor, shard_full
from tplora.errors import ShardError
from tplora.plan.style import FactorPlan
from tplora.upstream import local_shard

pytestmark = pytest.mark.world

SHAPE = (3, 7)


def _make(dim: int | None, *, shape: tuple[int, ...] = SHAPE) -> tuple[Factor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    owner = nn.Module()
    owner.weight = nn.Parameter(full.clone())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = FactorPlan(shape=shape, shard_dim=dim, is_grad_partial=dim is None)
    return Factor("layer.lora_A.default.weight", (owner, "weight"), plan, mesh), full


def _cut(dim: int | None) -> None:
    factor, full = _make(dim)
    parameter = factor.parameter
    assert isinstance(parameter, DTensor)
    assert parameter.shape == full.shape, "the full logical shape"
    assert_is_shard(shard=parameter.detach(), full=full, dim=dim, what="A", is_exact=True)
    assert_is_shard(shard=factor.local().detach(), full=full, dim=dim, what="leaf", is_exact=True)
    assert_is_shard(shard=factor.full(), full=full, dim=None, what="full", is_exact=True)
    assert not isinstance(factor.local(), DTensor)
    assert factor.local() is factor.local()


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_shard_then_gather_is_the_full_factor_bit_for_bit(world, dim):
    world.run(_cut, dim)


def _storage_is_own() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    full = torch.ones(SHAPE)
    for dim in (None, 0, 1):
        plan = FactorPlan(shape=SHAPE, shard_dim=dim, is_grad_partial=False)
        shard = shard_full(full, plan, mesh)
        shard.zero_()
        assert full.min() == 1.0, "the full factor would stay in memory behind its shard"


def test_a_shard_does_not_keep_the_full_factor(world2):
    world2.run(_storage_is_own)


def _wrong_shape() -> None:
    with pytest.raises(ShardError, match=r"lora_A\.default\.weight: has shape \(3, 7\).*\(4, 7\)"):
        _make(1, shape=(4, 7))


def test_a_factor_of_another_shape_is_refused_by_name(world2):
    world2.run(_wrong_shape)


def _replace_storage(how: str) -> None:
    factor, full = _make(1)
    stale = factor.local()
    with torch.no_grad():
        if how == "in place":
            factor.parameter.to_local().mul_(2.0)
        if how == "local data":
            local_shard(factor.parameter).data = local_shard(factor.parameter) * 2
        if how == "new parameter":
            doubled = nn.Parameter(factor.parameter.detach() * 2)
            factor._owner._parameters["weight"] = doubled
    leaf = factor.local()
    assert (leaf is stale) == (how == "in place")
    assert leaf.requires_grad
    assert_is_shard(shard=leaf.detach(), full=full * 2, dim=1, what="leaf", is_exact=True)


@pytest.mark.parametrize("how", ["in place", "local data", "new parameter"])
def test_the_leaf_follows_a_replaced_storage(world, how):
    world.run(_replace_storage, how)


def _moved(path: str) -> None:
    """``model.to(dtype)`` between two steps: the third step trains what is saved."""
    model, plain = load_tplora(path), load_plain(path)
    rows = tokens()
    for one in (model, plain):
        with InDouble():
            one(input_ids=rows, labels=rows).loss.backward()
        one.zero_grad()
        one.to(torch.float32)
        one.to(torch.float64)
        with InDouble():
            one(input_ids=rows, labels=rows).loss.backward()
        trained = [p for p in one.parameters() if p.requires_grad]
        torch.optim.SGD(trained, lr=0.5).step()
    _assert_factors(model, plain)
    with InDouble():
        losses = [one(input_ids=rows, labels=rows).loss.detach() for one in (model, plain)]
    assert_is_shard(shard=losses[0], full=losses[1], dim=None, what="loss", atol=1e-11)


def _assert_factors(model: Any, plain: Any) -> None:
    wanted = dict(plain.named_parameters())
    for name, factor in model.factors().items():
        shard, dim = factor.parameter.detach(), factor.plan.shard_dim
        assert_is_shard(shard=shard, full=wanted[name].detach(), dim=dim, what=name, atol=1e-11)
        assert factor.local().data_ptr() == local_shard(factor.parameter).data_ptr(), name


def test_training_goes_on_after_the_model_was_moved(world, checkpoint):
    world.run(_moved, checkpoint("llama"))
