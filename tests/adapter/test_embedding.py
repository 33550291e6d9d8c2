"""Embeddings cut on the vocabulary and on the hidden size against plain torch."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.adapter.layers import Case, Layer, plain_embedding
from tests.communication import count_collectives
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.world import RankError
from tplora.adapter import embedding
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.gradients import GradientSync

pytestmark = pytest.mark.world

VOCAB = Case("embedding_rowwise", out_features=127, in_features=6, has_bias=False)
HIDDEN = Case("embedding_colwise", out_features=127, in_features=7, has_bias=False)


def _tokens(case: Case) -> torch.Tensor:
    """Both ends of the vocabulary, every rank's part, and one token twice."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(case.out_features, (2, 9), generator=generator)
    drawn[0, :4] = torch.tensor([0, case.out_features - 1, 5, 5])
    return drawn


def _embedding_equals_plain_torch(case: Case) -> None:
    layer = Layer(case)
    numbers, tokens = layer.numbers, _tokens(case)
    for tensor in (*numbers.a.values(), *numbers.b.values()):
        tensor.requires_grad_()
    y_full = plain_embedding(case, numbers, tokens)
    generator = torch.Generator().manual_seed(5)
    dy = torch.randn(*tokens.shape, case.in_features, generator=generator, dtype=torch.float64)
    y = layer(tokens)
    assert_is_shard(shard=y.detach(), full=y_full.detach(), dim=None, what="y")
    assert_same_on_all_ranks(tensor=y, what="y")
    if case.is_disabled:
        assert not y.requires_grad
        return
    y_full.backward(dy)
    y.backward(dy)
    for name in case.adapters:
        pairs = zip(
            "AB", layer.factors[name].values(), (numbers.a[name], numbers.b[name]), strict=True
        )
        for key, factor, full in pairs:
            assert_is_shard(
                shard=factor.parameter.grad,
                full=full.grad,
                dim=factor.plan.shard_dim,
                what=f"grad of {key} of {name}",
            )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"out_features": 12},
        {"r": 1},
        {"num_adapters": 2},
        {"is_disabled": True},
        {"padding_idx": 5},
        {"padding_idx": 126},
        {"embed_scale": 2.5},
        {"embed_scale": 2.5, "num_adapters": 2, "padding_idx": 5},
    ],
    ids=lambda change: "-".join(f"{key}={value}" for key, value in change.items()) or "plain",
)
@pytest.mark.parametrize("case", [VOCAB, HIDDEN], ids=str)
def test_an_embedding_equals_plain_torch(world, case, change):
    world.run(_embedding_equals_plain_torch, replace(case, **change))


def _communication(case: Case) -> tuple[dict[str, int], dict[str, int], int]:
    layer = Layer(case)
    outputs: list[torch.Tensor] = []
    forward = count_collectives(lambda: outputs.append(layer(_tokens(case))))
    backward = count_collectives(lambda: outputs[0].sum().backward())
    return forward, backward, layer.sync.num_buckets


def test_communication_is_that_of_the_docstring(world):
    """Backward's only all-reduce is the bucket."""
    assert world.run(_communication, VOCAB)[0] == ({"all_reduce": 1}, {"all_reduce": 1}, 1)
    assert world.run(_communication, HIDDEN)[0] == ({"all_gather": 1}, {"all_reduce": 1}, 1)


def _while_unmasked() -> None:
    """Every rank looks every token up, as if all were its own."""
    start_of_all = mock.patch.object(embedding, "shard_range", lambda size, *_: (0, size))
    with start_of_all:
        _embedding_equals_plain_torch(replace(VOCAB, out_features=12))


def test_parity_sees_tokens_that_two_ranks_answer(world2):
    with pytest.raises(RankError, match=r"AssertionError: y|index out of range"):
        world2.run(_while_unmasked)


def _while_unreduced(case: Case) -> None:
    with mock.patch.object(GradientSync, "_reduce"):
        _embedding_equals_plain_torch(case)


def test_parity_sees_an_unreduced_gradient_of_b(world2):
    with pytest.raises(RankError, match="AssertionError: grad of B"):
        world2.run(_while_unreduced, VOCAB)


def _while_unscaled() -> None:
    """The embedding is scaled, its delta is not."""
    add_delta = TploraEmbedding._add_delta

    def of_a_scaled_one(self, rows, *args):
        return rows + (add_delta(self, rows, *args) - rows) / 2.5

    with mock.patch.object(TploraEmbedding, "_add_delta", of_a_scaled_one):
        _embedding_equals_plain_torch(replace(HIDDEN, embed_scale=2.5))


def test_parity_sees_a_delta_that_is_not_scaled_with_its_embedding(world2):
    with pytest.raises(RankError, match="AssertionError: y"):
        world2.run(_while_unscaled)


def test_parity_sees_an_unreduced_gradient_of_a_under_a_hidden_cut(world2):
    with pytest.raises(RankError, match="AssertionError: grad of A"):
        world2.run(_while_unreduced, HIDDEN)
