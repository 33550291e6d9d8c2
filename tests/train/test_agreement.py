"""The cheap proofs that ranks still run one run: they see one bit, and raise on every rank."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.adapter.models import load_tplora, tokens
from tests.communication import Recorded
from tplora.errors import TrainError
from tplora.train.agreement import (
    check_finite,
    check_same_batch,
    check_same_replicas,
    fingerprint,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]


def _tensor(dtype: torch.dtype, size: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 200, (size,), generator=generator).to(dtype)


def _with_bit_flipped(tensor: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    changed = tensor.clone()
    raw = changed.view(torch.uint8)
    at = place * tensor.element_size() + bit // 8
    raw[at] = int(raw[at]) ^ (1 << bit % 8)
    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fingerprint_changes_with_any_bit(dtype):
    tensor = _tensor(dtype)
    before = fingerprint(tensor)
    assert before.dtype == torch.int64
    assert torch.equal(fingerprint(tensor.clone()), before)
    for place in (0, 1, 31, 63):
        for bit in range(8 * tensor.element_size()):
            changed = _with_bit_flipped(tensor, place, bit)
            assert not torch.equal(fingerprint(changed), before), (place, bit)


@given(st.integers(0, 63), st.integers(0, 63))
def test_a_fingerprint_changes_with_any_swap(one, other):
    tensor = torch.arange(64) * 3
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert torch.equal(fingerprint(swapped), fingerprint(tensor)) == (one == other)


@pytest.mark.parametrize("distance", [65_520, 65_521, 65_522, 131_042])
def test_a_fingerprint_sees_swaps_in_large_tensors(distance):
    """Also of two places whose weights could repeat."""
    tensor = torch.arange(200_000)
    swapped = tensor.clone()
    swapped[7], swapped[7 + distance] = tensor[7 + distance], tensor[7]
    assert not torch.equal(fingerprint(swapped), fingerprint(tensor))


def test_a_fingerprint_is_of_values_not_of_strides():
    tensor = torch.randn(5, 7)
    assert torch.equal(fingerprint(tensor.T.contiguous().T), fingerprint(tensor))


def test_a_fingerprint_takes_empty_and_boolean_tensors():
    assert fingerprint(torch.empty(0)).tolist() == [0, 0]
    mask = torch.tensor([True, False, True])
    assert not torch.equal(fingerprint(mask), fingerprint(~mask))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stops_training(value):
    with pytest.raises(TrainError, match="step 7: the loss is"):
        check_finite(value, what="the loss", step=7)
    check_finite(1.0, what="the loss", step=7)


def _one_ulp(path: str) -> int:
    model = load_tplora(path)
    with Recorded() as sent:
        check_same_replicas(model, step=3)
    replicas = [f for f in model.factors().values() if f.plan.shard_dim is None]
    assert sent.of("all_gather") == [16 * len(replicas)]
    changed = replicas[len(replicas) // 2]
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            leaf = changed.local()
            leaf[1, 1] = torch.nextafter(leaf[1, 1], torch.full_like(leaf[1, 1], torch.inf))
    last = dist.get_world_size() - 1
    name = changed.name.replace(".", r"\.")
    with pytest.raises(TrainError, match=rf"step 3: {name} differs .*tp rank {last},"):
        check_same_replicas(model, step=3)
    return len(replicas)


@pytest.mark.world
def test_one_ulp_of_one_replica_stops_every_rank_by_name(world, checkpoint):
    assert world.run(_one_ulp, checkpoint("llama"))[0] > 0


def _cut_factors_may_differ(path: str) -> None:
    model = load_tplora(path)
    with torch.no_grad():
        for factor in model.factors().values():
            if factor.plan.shard_dim is not None:
                factor.local().add_(dist.get_rank())
    check_same_replicas(model, step=1)


@pytest.mark.world
def test_pieces_of_cut_factors_may_differ(world2, checkpoint):
    world2.run(_cut_factors_may_differ, checkpoint("llama"))


def _alone(path: str) -> None:
    check_same_replicas(load_tplora(path), step=1)
    check_same_batch({"input_ids": tokens()}, None, step=1)


@pytest.mark.world
def test_one_process_agrees_with_itself(alone, checkpoint):
    alone.run(_alone, checkpoint("llama"))


def _batch(fault: str) -> None:
    group, is_last = dist.group.WORLD, dist.get_rank() == dist.get_world_size() - 1
    batch = {
        "input_ids": tokens(3, 8),
        "labels": tokens(3, 8),
        "attention_mask": torch.ones(3, 8, dtype=torch.bool),
        "note": "not a tensor",
    }
    with Recorded() as sent:
        check_same_batch(batch, group, step=2)
    assert len(sent.of("all_gather")) == 2  # the columns, then what they hold
    assert sent.of("all_gather")[0] < 200, "the rows themselves do not travel"
    name = {"mask": "attention_mask"}.get(fault, "input_ids")
    if is_last:
        if fault == "token":
            batch["input_ids"][2, 7] += 1
        if fault == "order":
            batch["input_ids"] = batch["input_ids"].flip(0)
        if fault == "shape":
            batch["input_ids"] = batch["input_ids"].reshape(8, 3)
        if fault == "longer":
            batch["input_ids"] = torch.cat([batch["input_ids"], torch.zeros(3, 1).long()], dim=1)
        if fault == "mask":
            batch["attention_mask"][0, 0] = False
    with pytest.raises(TrainError, match=f"step 2: '{name}' of the batch differs"):
        check_same_batch(batch, group, step=2)


@pytest.mark.world
@pytest.mark.parametrize("fault", ["token", "order", "shape", "longer", "mask"])
def test_one_rank_with_another_batch_stops_every_rank(world, fault):
    world.run(_batch, fault)


def _missing_column() -> None:
    batch = {"input_ids": tokens(), "labels": tokens()}
    if dist.get_rank() == 0:
        del batch["labels"]
    with pytest.raises(TrainError, match=r"labels|columns|batch"):
        check_same_batch(batch, dist.group.WORLD, step=2)


@pytest.mark.world
def test_one_rank_with_fewer_columns_stops_every_rank(world2):
    world2.run(_missing_column)
