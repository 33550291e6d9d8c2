"""The table of placements, row by row, and the arithmetic of pieces for all ranks of 1 to 8."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tplora.plan.style import STYLES, TensorPlan, place_factors, shard_range, shard_ranges

SIZES = st.integers(min_value=0, max_value=300)
TP_SIZES = st.integers(min_value=1, max_value=8)
OUT, IN, R = 7, 5, 3


@given(size=SIZES, tp_size=TP_SIZES)
def test_pieces_tile_the_range_in_order(size, tp_size):
    ranges = [shard_range(size, tp_rank, tp_size) for tp_rank in range(tp_size)]
    covered = [index for start, stop in ranges for index in range(start, stop)]
    assert covered == list(range(size))


@given(size=st.integers(min_value=1, max_value=300), tp_size=TP_SIZES)
def test_pieces_are_those_of_torch_chunk(size, tp_size):
    full = torch.arange(size)
    chunks = list(full.chunk(tp_size))
    for tp_rank in range(tp_size):
        start, stop = shard_range(size, tp_rank, tp_size)
        wanted = chunks[tp_rank] if tp_rank < len(chunks) else full[:0]
        assert torch.equal(full[start:stop], wanted)


@pytest.mark.parametrize(
    ("size", "tp_size", "ranges"),
    [
        (7, 1, [(0, 7)]),
        (7, 2, [(0, 4), (4, 7)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (4, 3, [(0, 2), (2, 4), (4, 4)]),
        (2, 3, [(0, 1), (1, 2), (2, 2)]),
        (127, 3, [(0, 43), (43, 86), (86, 127)]),
    ],
)
def test_the_last_pieces_are_shorter_or_empty(size, tp_size, ranges):
    assert [shard_range(size, tp_rank, tp_size) for tp_rank in range(tp_size)] == ranges


@given(
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    tp_size=TP_SIZES,
)
def test_shapes_of_pieces_are_those_of_the_pieces(shape, dim, tp_size):
    dim %= len(shape)
    plan = TensorPlan(shape=tuple(shape), shard_dim=dim)
    chunks = torch.empty(shape).chunk(tp_size, dim=dim)
    for tp_rank, chunk in enumerate(chunks):
        assert plan.shard_shape(tp_rank, tp_size) == tuple(chunk.shape)
        assert plan.shard_numel(tp_rank, tp_size) == chunk.numel()
    held = sum(plan.shard_numel(tp_rank, tp_size) for tp_rank in range(tp_size))
    assert held == plan.numel == torch.empty(shape).numel()


@pytest.mark.parametrize("tp_size", range(1, 9))
def test_every_rank_holds_all_of_a_replicated_tensor(tp_size):
    plan = TensorPlan(shape=(OUT, IN), shard_dim=None)
    for tp_rank in range(tp_size):
        assert plan.shard_shape(tp_rank, tp_size) == (OUT, IN)
        assert plan.shard_numel(tp_rank, tp_size) == OUT * IN


# kind, dim of W that is cut, whole W on sharded activations -> A's dim and partial, B's
TABLE = {
    "W cut on out": ("linear", 0, False, (None, True), (0, False)),
    "W cut on in": ("linear", 1, False, (1, False), (None, True)),
    "W not cut": ("linear", None, False, (None, False), (None, False)),
    "W not cut, activations sharded": ("linear", None, True, (None, True), (None, True)),
    "embedding cut on vocab": ("embedding", 0, False, (1, False), (None, True)),
    "embedding cut on hidden": ("embedding", 1, False, (None, True), (0, False)),
    "embedding not cut": ("embedding", None, False, (None, False), (None, False)),
}


@pytest.mark.parametrize("row", TABLE)
def test_factors_are_placed_as_in_the_table(row):
    kind, weight_dim, is_replica_grad_partial, a_wanted, b_wanted = TABLE[row]
    shape = (OUT, IN) if kind == "linear" else (IN, OUT)  # an embedding's W is [vocab, hidden]
    in_dim = 1 if kind == "linear" else 0
    a, b = place_factors(
        TensorPlan(shape=shape, shard_dim=weight_dim),
        in_dim=in_dim,
        out_dim=1 - in_dim,
        r=R,
        is_replica_grad_partial=is_replica_grad_partial,
    )
    assert (a.shape, b.shape) == ((R, IN), (OUT, R))
    assert (a.shard_dim, a.is_grad_partial) == a_wanted
    assert (b.shard_dim, b.is_grad_partial) == b_wanted


# style -> dim of W that is cut, gathers its output, splits its input, gradients of replicas partial
STYLES_READ_UPSTREAM = {
    "linear": {
        "colwise": (0, False, False, False),
        "colwise_gather_output": (0, True, False, False),
        "colwise_rep": (0, True, False, False),
        "rowwise": (1, False, False, False),
        "rowwise_split_input": (1, False, True, False),
        "rowwise_rep": (1, False, True, False),
        "replicate": (None, False, False, False),
        "replicated_with_grad_allreduce": (None, False, False, True),
        "mla_kv_a_proj": (None, False, False, False),
        None: (None, False, False, False),
    },
    "embedding": {
        "embedding_rowwise": (0, False, False, False),
        "embedding_colwise": (1, True, False, False),
        "replicate": (None, False, False, False),
        None: (None, False, False, False),
    },
    "parameter": {
        "colwise": (0, False, False, False),
        "colwise_gather_output": (0, True, False, False),
        "colwise_rep": (0, True, False, False),
        "packed_colwise": (0, False, False, False),
        "rowwise": (1, False, False, False),
        "packed_rowwise": (1, False, False, False),
        "replicate": (None, False, False, False),
        None: (None, False, False, False),
    },
}


@pytest.mark.parametrize("kind", STYLES_READ_UPSTREAM)
def test_each_style_is_what_transformers_does(kind):
    found = {
        name: (
            style.weight_shard_dim,
            style.gathers_output,
            style.splits_input,
            style.is_replica_grad_partial,
        )
        for name, style in STYLES[kind].items()
    }
    assert found == STYLES_READ_UPSTREAM[kind]
    transforming = {name for name, style in STYLES[kind].items() if style.transforms_output}
    assert transforming == ({"mla_kv_a_proj"} if kind == "linear" else set())


def test_a_factor_that_is_cut_never_has_a_partial_gradient():
    for kind, styles in STYLES.items():
        for style in styles.values():
            weight = TensorPlan(shape=(OUT, IN), shard_dim=style.weight_shard_dim)
            in_dim = 0 if kind == "embedding" else 1
            for factor in place_factors(
                weight,
                in_dim=in_dim,
                out_dim=1 - in_dim,
                r=R,
                is_replica_grad_partial=style.is_replica_grad_partial,
            ):
                assert not (factor.shard_dim is not None and factor.is_grad_partial)


EXPERTS = {
    "[E, out, in] cut on out, fused": ((2, 1), 1, 2, (None, 1, True), (0, 2, False)),
    "[E, out, in] cut on in": ((2, 1), 2, 1, (1, 1, False), (None, 1, True)),
    "[E, in, out] cut on out, fused": ((1, 2), 2, 2, (None, 1, True), (0, 2, False)),
    "[E, in, out] cut on in": ((1, 2), 1, 1, (1, 1, False), (None, 1, True)),
    "[E, in, out] that peft takes for [E, out, in], fused": (
        (2, 1),
        2,
        2,
        (1, 2, False),
        (None, 1, True),
    ),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_factors_of_stacked_experts_are_cut_like_the_experts(case):
    (in_dim, out_dim), dim, split_factor, a_wanted, b_wanted = EXPERTS[case]
    weight = TensorPlan(shape=(5, 24, 20), shard_dim=dim, split_factor=split_factor)
    a, b = place_factors(weight, in_dim=in_dim, out_dim=out_dim, r=R, is_replica_grad_partial=False)
    assert a.shape == (5 * R, weight.shape[in_dim])
    assert b.shape == (weight.shape[out_dim], R * 5)
    assert (a.shard_dim, a.split_factor, a.is_grad_partial) == a_wanted
    assert (b.shard_dim, b.split_factor, b.is_grad_partial) == b_wanted


@pytest.mark.parametrize("tp_size", range(1, 9))
@pytest.mark.parametrize("split_factor", [1, 2, 3])
def test_fused_weights_are_cut_each_on_its_own(split_factor, tp_size):
    size = 7 * split_factor
    held = [shard_ranges(size, tp_rank, tp_size, split_factor) for tp_rank in range(tp_size)]
    rows = sorted(row for ranges in held for start, stop in ranges for row in range(start, stop))
    assert rows == list(range(size))
    for ranges in held:
        lengths = {stop - start for start, stop in ranges}
        assert len(ranges) == split_factor
        assert len(lengths) == 1  # as much of gate as of up
