"""Dropout's masks do not depend on tp_size, and leave the generators as they were."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.adapter.models import load_plain, load_tplora, tokens
from tests.models import InDouble
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tplora.adapter.dropout import ForwardSeed, ShardedDropout

SIZE = 127


def _drop(module: ShardedDropout, x: torch.Tensor, key: int = 5) -> torch.Tensor:
    torch.manual_seed(key)
    return module(x)


# --- level 0


def test_a_share_p_is_zeroed_and_the_rest_scaled():
    y = _drop(ShardedDropout(0.25, in_features=SIZE, mesh=None), torch.ones(400, SIZE))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=0.01)


def test_each_call_draws_another_mask_and_evaluation_none():
    module, x = ShardedDropout(0.5, in_features=SIZE, mesh=None), torch.ones(4, SIZE)
    torch.manual_seed(5)
    assert not torch.equal(module(x), module(x))
    assert module.eval()(x) is x


def test_the_gradient_has_the_mask_of_the_output():
    x = torch.ones(4, SIZE, requires_grad=True)
    y = _drop(ShardedDropout(0.5, in_features=SIZE, mesh=None), x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


class _Root(nn.Module):
    def __init__(self, *, is_failing: bool = False) -> None:
        super().__init__()
        self.is_failing = is_failing

    def forward(self) -> float:
        if self.is_failing:
            raise MemoryError("out of memory")
        return torch.rand(()).item()


def _watched(seed: int = 1, data_rank: int = 0, **settings: Any) -> _Root:
    root, forward_seed = _Root(**settings), ForwardSeed(seed, data_rank)
    root.register_forward_pre_hook(forward_seed.enter)
    root.register_forward_hook(forward_seed.leave, always_call=True)
    return root


def test_draws_follow_from_seed_data_rank_and_number_of_the_forward():
    def draws(*args: int) -> list[float]:
        root = _watched(*args)
        return [root() for _ in range(3)]

    torch.manual_seed(0)
    first = draws(1, 0)
    torch.manual_seed(99)
    assert draws(1, 0) == first, "whatever the default generator holds"
    assert len({*first, *draws(2, 0), *draws(1, 1), *draws(0, 1), *draws(0, 0)}) == 15


def test_evaluation_neither_seeds_nor_counts():
    root = _watched()
    first = root()
    torch.manual_seed(3)
    wanted = torch.rand(()).item()
    torch.manual_seed(3)
    assert root.eval()() == wanted
    assert _watched()() == first
    other = _watched()
    other.eval()()
    assert other.train()() == first


@pytest.mark.parametrize("is_failing", [False, True])
def test_the_generator_is_put_back_also_after_an_exception(is_failing):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    root = _watched(is_failing=is_failing)
    if is_failing:
        with pytest.raises(MemoryError):
            root()
    else:
        root()
    assert torch.equal(torch.get_rng_state(), before)
    if is_failing:
        root.is_failing = False
        root()
        assert torch.equal(torch.get_rng_state(), before)


# --- level 1


def _slices_are_of_the_full_mask(size: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    full = _drop(ShardedDropout(0.5, in_features=size, mesh=None), torch.ones(6, size))
    assert_same_on_all_ranks(tensor=full, what="full mask")
    own = full.chunk(dist.get_world_size(), dim=-1)
    width = own[dist.get_rank()].shape[-1] if dist.get_rank() < len(own) else 0
    piece = _drop(ShardedDropout(0.5, in_features=size, mesh=mesh), torch.ones(6, width))
    assert_is_shard(shard=piece, full=full, dim=-1, what="mask", is_exact=True)


@pytest.mark.world
@pytest.mark.parametrize("size", [12, SIZE])
def test_each_rank_keeps_its_slice_of_the_full_mask(world, size):
    world.run(_slices_are_of_the_full_mask, size)


def _masks(model: Any, run: Any) -> dict[str, list[torch.Tensor]]:
    """Each layer's masks in order: where its dropout made a zero of a number."""
    seen: dict[str, list[torch.Tensor]] = {}
    names = {module: name for name, module in model.named_modules()}
    draw = ShardedDropout.draw

    def watched(module: ShardedDropout, x: torch.Tensor) -> torch.Tensor | None:
        keep = draw(module, x)
        assert keep is not None
        seen.setdefault(names[module], []).append(~keep & (x.detach() != 0))
        return keep

    with mock.patch.object(ShardedDropout, "draw", watched):
        run()
    return seen


def _masks_of_two_steps(path: str) -> None:
    model = load_tplora(path, lora_dropout=0.5).train()
    other = load_tplora(path, lora_dropout=0.5, data_rank=1).train()
    forward = lambda one: lambda: one(input_ids=tokens())  # noqa: E731
    first, second = (_masks(model, forward(model)) for _ in range(2))
    elsewhere = _masks(other, forward(other))
    q, v = (
        f"base_model.model.model.layers.0.self_attn.{k}_proj.lora_dropout.default" for k in "qv"
    )
    for name in (q, v):
        assert_same_on_all_ranks(tensor=first[name][0].int(), what=name)
        assert not torch.equal(first[name][0], second[name][0]), "steps"
        assert not torch.equal(first[name][0], elsewhere[name][0]), "data ranks"
    assert not torch.equal(first[q][0], first[v][0]), "layers"
    below = q.replace("layers.0", "layers.1")
    assert not torch.equal(first[q][0], first[below][0]), "blocks"


@pytest.mark.world
def test_masks_differ_between_layers_steps_and_data_ranks_but_not_tp_ranks(world, checkpoint):
    world.run(_masks_of_two_steps, checkpoint("llama"))


def _checkpointed(path: str, use_reentrant: bool) -> None:
    plain = load_tplora(path, lora_dropout=0.5).train()
    model = load_tplora(path, lora_dropout=0.5).train()
    model.enable_input_require_grads()
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    rows = tokens()
    torch.manual_seed(50 + dist.get_rank())
    before = torch.get_rng_state()
    masks = _masks(model, lambda: model(input_ids=rows, labels=rows).loss.backward())
    assert torch.equal(torch.get_rng_state(), before), "the generator outside was moved"
    plain(input_ids=rows, labels=rows).loss.backward()
    inside = {name: found for name, found in masks.items() if "layers" in name}
    assert inside
    for name, found in inside.items():
        assert len(found) == 2, f"{name} was not computed again"
        assert torch.equal(*found), f"{name} has another mask in the recomputation"
    for name, factor in model.factors().items():
        grad = plain.factors()[name].parameter.grad.to_local()
        assert_is_shard(shard=factor.parameter.grad, full=grad, dim=None, what=name)


@pytest.mark.world
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_checkpointing_draws_the_same_masks_again(world, checkpoint, use_reentrant):
    world.run(_checkpointed, checkpoint("llama"), use_reentrant)


def _losses(path: str, num_steps: int) -> list[float]:
    model = load_tplora(path, lora_dropout=0.5, target_modules="all-linear").train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(num_steps):
        rows = tokens(seed=step)
        with InDouble():  # in float32, sums over parts of a vocabulary differ by a rounding
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.is_initialized():
        for name, factor in model.factors().items():
            if factor.plan.shard_dim is None:
                assert_same_on_all_ranks(tensor=factor.parameter.detach(), what=name)
    return losses


@pytest.mark.world
def test_three_steps_with_dropout_are_those_of_one_process(world, alone, checkpoint):
    path = checkpoint("llama")
    wanted = alone.run(_losses, path, 3)[0]
    for found in world.run(_losses, path, 3):
        assert found == pytest.approx(wanted, rel=0, abs=1e-11)


def _without_dropout_it_is_plain(path: str) -> None:
    rows = tokens()
    model, plain = load_tplora(path, lora_dropout=0.5).eval(), load_plain(path).eval()
    found, wanted = (one(input_ids=rows).logits.detach() for one in (model, plain))
    assert_is_shard(shard=found, full=wanted, dim=None, what="logits")


@pytest.mark.world
def test_evaluation_drops_nothing(world2, checkpoint):
    world2.run(_without_dropout_it_is_plain, checkpoint("llama"))


def _losses_with_stock_dropout(path: str) -> list[float]:
    """PEFT's nn.Dropout, drawing from each rank's own generator."""
    with (
        mock.patch("tplora.adapter.layers.shard_dropout"),
        mock.patch.object(ForwardSeed, "enter", return_value=None),
    ):
        return _losses(path, 3)


@pytest.mark.world
def test_the_losses_show_stock_dropout_on_ranks_seeded_differently(world2, alone, checkpoint):
    path = checkpoint("llama")
    wanted = alone.run(_losses, path, 3)[0]
    for found in world2.run(_losses_with_stock_dropout, path):
        assert found != pytest.approx(wanted, rel=0, abs=1e-3)
