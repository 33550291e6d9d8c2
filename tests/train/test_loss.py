"""Statistics of labels under a head cut on the vocabulary, against plain log_softmax."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.communication import Recorded, count_collectives
from tests.models import world_size
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter.head import chunked, softmax
from tplora.adapter.head import statistics as loss
from tplora.adapter.head.statistics import LabelStatistics, label_log_probs, label_statistics
from tplora.collectives.operators import replicate_input
from tplora.plan.style import shard_range

V, H, R = 127, 6, 3
NAMES = ("log_probs", "entropy", "lse", "mean_logits", "log_sum_sq_probs", "is_top1", "top")
WITH_GRADIENT = NAMES[:4]


@dataclass(frozen=True)
class Case:
    num_tokens: int = 11
    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    chunk_tokens: int | None = None
    """Tokens a chunk on every rank; None leaves the default, one chunk here."""

    def change(self, z: torch.Tensor) -> torch.Tensor:
        z = z * self.scale
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature

    def in_chunks(self) -> Any:
        num_bytes = chunked.CHUNK_BYTES
        if self.chunk_tokens is not None:
            num_bytes = self.chunk_tokens * 4 * -(-V // world_size())
        return mock.patch.object(chunked, "CHUNK_BYTES", num_bytes)

    def project(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.change(_project(*tensors))


def _numbers(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"h": (case.num_tokens, H), "w": (V, H), "bias": (V,), "a": (R, H), "b": (V, R)}
    numbers = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }
    numbers["labels"] = torch.randint(V, (case.num_tokens,), generator=generator)
    if case.num_tokens > 3:  # both ends of the vocabulary, and of the middle
        numbers["labels"][:3] = torch.tensor([0, V - 1, V // 2])
    for name in WITH_GRADIENT:
        shape = (case.num_tokens,)
        numbers[f"d_{name}"] = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return numbers


def _backward(found: dict[str, torch.Tensor], numbers: dict[str, torch.Tensor]) -> None:
    torch.autograd.backward(
        [found[name] for name in WITH_GRADIENT], [numbers[f"d_{name}"] for name in WITH_GRADIENT]
    )


def _project(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return F.linear(h, w, bias) + 2.0 * F.linear(F.linear(h, a), b)


def _plain(case: Case, numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    z = case.project(*(numbers[name] for name in ("h", "w", "bias", "a", "b")))
    log_p = torch.log_softmax(z, dim=-1)
    labels = numbers["labels"]
    return {
        "log_probs": log_p.gather(1, labels[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "lse": z.logsumexp(-1),
        "mean_logits": z.mean(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "is_top1": z.argmax(-1) == labels if len(labels) else labels.bool(),
        "top": z.argmax(-1) if len(labels) else labels,
    }


def _own(numbers: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], int]:
    """This rank's leaves: the head's rows are cut, h and A are whole."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    start, stop = shard_range(V, rank, world_size())
    own = {name: numbers[name].detach().clone() for name in ("h", "a")}
    own |= {name: numbers[name].detach()[start:stop].clone() for name in ("w", "bias", "b")}
    return {name: tensor.requires_grad_() for name, tensor in own.items()}, start


def _statistics(case: Case, numbers: dict[str, torch.Tensor]) -> tuple[LabelStatistics, dict]:
    own, start = _own(numbers)
    group = dist.group.WORLD
    h = replicate_input(own["h"], group)
    with case.in_chunks():
        found = label_statistics(
            (h,),
            (own["w"], own["bias"], own["a"], own["b"]),
            numbers["labels"],
            case.project,
            vocab_start=start,
            vocab_size=V,
            group=group,
        )
        if case.num_tokens:
            _backward({name: getattr(found, name) for name in NAMES}, numbers)
    return found, own


def _equals_log_softmax(case: Case) -> None:
    numbers = _numbers(case)
    wanted = _plain(case, numbers)
    found, own = _statistics(case, numbers)
    for name in NAMES:
        value = getattr(found, name)
        if name in ("is_top1", "top"):
            assert torch.equal(value, wanted[name]), name
        else:
            assert_is_shard(
                shard=value.detach(), full=wanted[name].detach(), dim=None, what=name, atol=1e-11
            )
        assert_same_on_all_ranks(tensor=value.double(), what=name)
    if not case.num_tokens:
        return
    _backward(wanted, numbers)
    d_a = own["a"].grad.clone()
    dist.all_reduce(d_a)  # A is replicated and fed to shards: its gradient is partial
    grads = {name: tensor.grad for name, tensor in own.items()} | {"a": d_a}
    for name, dim in {"h": None, "a": None, "w": 0, "bias": 0, "b": 0}.items():
        full = numbers[name].grad
        assert_is_shard(shard=grads[name], full=full, dim=dim, what=f"d{name}", atol=1e-11)


CASES = {
    "plain": Case(),
    "one token": Case(num_tokens=1),
    "no token": Case(num_tokens=0),
    "softcap": Case(softcap=8.0),
    "scale": Case(scale=0.25),
    "temperature": Case(temperature=0.7),
    "all of it": Case(softcap=5.0, scale=0.5, temperature=1.3, chunk_tokens=3),
    "chunks of 1": Case(chunk_tokens=1),
    "chunks of 4": Case(chunk_tokens=4),
    "chunks of 11": Case(chunk_tokens=11),
}


@pytest.mark.world
@pytest.mark.parametrize("name", CASES)
def test_statistics_and_gradients_are_those_of_the_full_logits(world, name):
    world.run(_equals_log_softmax, CASES[name])


def _large_logits() -> None:
    """Logits of a thousand: no exponential may overflow, on the rank that has none of the mass."""
    numbers = _numbers(Case())
    with torch.no_grad():
        numbers["w"].mul_(300)
    found, own = _statistics(Case(), numbers)
    wanted = _plain(Case(), numbers)
    for name in NAMES[:5]:
        value, full = getattr(found, name).detach(), wanted[name].detach()
        assert bool(torch.isfinite(value).all()), name
        if name != "entropy":
            assert_is_shard(shard=value, full=full, dim=None, what=name, atol=1e-9)
    assert bool(torch.isfinite(own["w"].grad).all())


@pytest.mark.world
def test_large_logits_overflow_nothing(world):
    world.run(_large_logits)


def _low_precision(dtype: torch.dtype) -> None:
    numbers = {
        name: t.detach().to(dtype).requires_grad_() if t.requires_grad else t
        for name, t in _numbers(Case()).items()
    }
    numbers |= {f"d_{name}": numbers[f"d_{name}"].float() for name in WITH_GRADIENT}
    found, own = _statistics(Case(chunk_tokens=4), numbers)
    assert found.log_probs.dtype == torch.float32
    assert own["w"].grad.dtype == dtype
    wide = {name: t.detach().double() for name, t in numbers.items() if name != "labels"}
    wanted = _plain(Case(), wide | {"labels": numbers["labels"]})
    worst = (found.log_probs.double() - wanted["log_probs"]).abs().max()
    assert worst < 0.2


@pytest.mark.world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_half_precision_head_is_counted_in_float32(world2, dtype):
    world2.run(_low_precision, dtype)


def _communication(case: Case, read: Any) -> tuple[list[tuple[str, int]], dict[str, int]]:
    numbers = _numbers(case)
    own, start = _own(numbers)
    kept: list[Any] = []

    def forward() -> None:
        kept.append(
            read(
                (own["h"],),
                (own["w"], own["bias"], own["a"], own["b"]),
                numbers["labels"],
                case.project,
                vocab_start=start,
                vocab_size=V,
                group=dist.group.WORLD,
            )
        )

    with Recorded() as sent:
        forward()
    found = kept[0] if isinstance(kept[0], torch.Tensor) else kept[0].log_probs
    return sent.calls, count_collectives(lambda: found.sum().backward())


@pytest.mark.world
@pytest.mark.parametrize("num_tokens", [1, 11])
@pytest.mark.parametrize(("read", "numbers"), [(label_statistics, 7), (label_log_probs, 3)])
def test_communication_is_one_gather_of_a_few_numbers_a_token(world, num_tokens, read, numbers):
    wanted = ([("all_gather", numbers * num_tokens * 8)], {})
    assert world.run(_communication, Case(num_tokens=num_tokens), read) == [wanted] * world.size


def _largest_logits(chunk_tokens: int) -> int:
    """The most logits that were alive in one product."""
    sizes: list[int] = []
    whole = _project

    def project(*tensors: torch.Tensor) -> torch.Tensor:
        logits = whole(*tensors)
        sizes.append(logits.numel())
        return logits

    with mock.patch(f"{__name__}._project", project):
        _statistics(Case(chunk_tokens=chunk_tokens), _numbers(Case()))
    return max(sizes)


@pytest.mark.world
def test_no_rank_holds_more_logits_than_one_chunk_of_its_part(world):
    for largest in world.run(_largest_logits, 2):
        assert largest <= 2 * -(-V // world.size)


def _whole_head() -> None:
    case = Case(chunk_tokens=None)
    numbers = _numbers(case)
    found = label_statistics(
        (numbers["h"],),
        tuple(numbers[name] for name in ("w", "bias", "a", "b")),
        numbers["labels"],
        case.project,
        vocab_start=0,
        vocab_size=V,
        group=None,
    )
    assert_is_shard(
        shard=found.log_probs.detach(),
        full=_plain(case, numbers)["log_probs"].detach(),
        dim=None,
        what="log_probs",
        atol=1e-11,
    )


@pytest.mark.world
def test_a_head_that_is_whole_needs_no_group(alone):
    alone.run(_whole_head)


# --- a frozen head


def _log_probs_of_a_frozen_head(case: Case, read: Any) -> int:
    """Against whole logits; how many tokens went through the head, of each that there is."""
    numbers = _numbers(case)
    _plain(case, numbers)["log_probs"].backward(numbers["d_log_probs"])
    own, start = _own(numbers)
    frozen, calls = tuple(own[name].detach() for name in ("w", "bias", "a", "b")), []

    def project(rows: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return case.project(rows, *rest)

    group = dist.group.WORLD if world_size() > 1 else None
    hidden = own["h"] if group is None else replicate_input(own["h"], group)
    where = {"vocab_start": start, "vocab_size": V, "group": group}
    with case.in_chunks():
        found = read((hidden,), frozen, numbers["labels"], project, **where)
        found = found.log_probs if isinstance(found, LabelStatistics) else found
        found.backward(numbers["d_log_probs"])
    wanted = _plain(case, numbers)["log_probs"].detach()
    assert_is_shard(shard=found.detach(), full=wanted, dim=None, what="log_probs", atol=1e-11)
    full = numbers["h"].grad
    assert_is_shard(shard=own["h"].grad, full=full, dim=None, what="dh", atol=1e-11)
    if group is not None:
        assert_same_on_all_ranks(tensor=own["h"].grad, what="dh")
    return sum(calls) // case.num_tokens


@pytest.mark.world
@pytest.mark.parametrize("read", [label_log_probs, label_statistics])
@pytest.mark.parametrize("name", ["softcap", "all of it", "one token"])
def test_logits_of_one_chunk_are_computed_once(world, read, name):
    times = 1 if CASES[name].chunk_tokens is None else 2
    found = world.run(_log_probs_of_a_frozen_head, CASES[name], read)
    assert found == [times] * world.size


@pytest.mark.world
@pytest.mark.parametrize("read", [label_log_probs, label_statistics])
def test_one_process_computes_no_chunk_twice(alone, read):
    assert alone.run(_log_probs_of_a_frozen_head, CASES["all of it"], read) == [1]


def _own_part_only(weights: Any, own_max: Any, own: Any, _whole: Any) -> torch.Tensor:
    return _LABEL_SLOPE(weights, own_max, own, {"max": own_max, "log_total": weights.sum(-1).log()})


_LABEL_SLOPE = softmax.label_slope


def _while_its_slope_is_of_its_own_part() -> None:
    with mock.patch.object(softmax, "label_slope", _own_part_only):
        _log_probs_of_a_frozen_head(CASES["plain"], label_log_probs)


@pytest.mark.world
def test_parity_sees_a_slope_of_the_own_part_alone(world2):
    with pytest.raises(RankError, match="dh"):
        world2.run(_while_its_slope_is_of_its_own_part)


# --- broken on purpose


def _while_broken(name: str) -> None:
    breaks = {
        "own part only": mock.patch.object(loss, "_gather", lambda partial, _group: partial[None]),
        "no rescaling": mock.patch.object(softmax, "combine", _combine_without_rescaling),
        "entropy forgotten": mock.patch.object(softmax, "grad_logits", _grad_without_entropy),
        "input not summed": mock.patch(f"{__name__}.replicate_input", lambda x, _group: x),
    }
    with breaks[name]:
        _equals_log_softmax(CASES["chunks of 4"])


def _combine_without_rescaling(parts: torch.Tensor) -> dict[str, torch.Tensor]:
    return _COMBINE(torch.cat([parts[:, :1] * 0 + parts[:, 0].max(), parts[:, 1:]], dim=1))


def _grad_without_entropy(logits: Any, own: Any, size: Any, *per_token: Any) -> Any:
    given = list(per_token)
    given[4] = torch.zeros_like(given[4])
    return _GRAD_LOGITS(logits, own, size, *given)


_COMBINE, _GRAD_LOGITS = softmax.combine, softmax.grad_logits


@pytest.mark.world
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("own part only", "log_probs"),
        ("no rescaling", "log_probs"),
        ("entropy forgotten", "dh"),
        ("input not summed", "dh"),
    ],
)
def test_parity_sees(world2, name, seen):
    with pytest.raises(RankError, match=f"AssertionError: {seen}: "):
        world2.run(_while_broken, name)
