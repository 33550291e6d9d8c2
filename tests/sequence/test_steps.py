"""A run on cut sequences is the run of one process: ten steps, every number."""

import pytest

from tests.broken import TRAINED_ON_TOKENS
from tests.communication import count_collectives
from tests.models import CUT, STEPS, Case, batches, compare_run, load, lora
from tests.parity import assert_same_on_all_ranks

pytestmark = pytest.mark.world


def _run_equals_the_run_alone(path, case, file):
    model = compare_run(path, case, file)
    assert model.sync.num_buckets == STEPS
    for name, factor in model.factors().items():
        if factor.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=factor.parameter, what=name)


ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
"""Of a model with experts: plain PEFT's "all-linear" adapts some of those in its own way; tests/zoo
holds theirs to it."""
EXPERTS = Case("query", is_cut=True, changes=ATTENTION)

CASES = [
    pytest.param(*case, marks=() if is_fast else pytest.mark.slow)
    for is_fast, cases in (
        (
            True,
            (
                (2, "phi3", Case(is_cut=True)),
                (2, "gemma2", Case(is_cut=True)),
                (2, "llama_bias", Case(is_cut=True, changes=TRAINED_ON_TOKENS)),
                (3, "gpt_neox", Case(is_cut=True, dropout=0.3)),
            ),
        ),
        (
            False,
            (
                *((3, name, Case(is_cut=True)) for name in ("phi3", "gemma2", "llama_bias")),
                *((2, name, Case(is_cut=True)) for name in ("qwen3", "cohere")),
                (4, "llama", Case(is_cut=True)),
                (3, "qwen3", Case(is_cut=True)),
                *((tp_size, "qwen3_moe", EXPERTS) for tp_size in (2, 3, 4)),
                (2, "llama", Case("query", is_cut=True)),
                (3, "cohere", Case(is_cut=True)),
                (3, "llama", Case(is_cut=True, dropout=0.3, checkpointing="reentrant")),
                (2, "gpt_neox", Case(is_cut=True, dropout=0.3)),
                (2, "llama", Case(is_cut=True, dropout=0.3, checkpointing="non-reentrant")),
                (3, "qwen2_tied", Case("ends", is_cut=True)),
                (3, "phi3", Case("fused-query", is_cut=True)),
                (3, "llama", Case("patterns", is_cut=True)),
            ),
        ),
    )
    for case in cases
]


@pytest.mark.parametrize(("tp_size", "name", "case"), CASES, ids=str)
def test_ten_steps_equal_those_of_one_process(world_of, recorded, tp_size, name, case):
    path, file = recorded(name, case)
    world_of(tp_size).run(_run_equals_the_run_alone, path, case, file)


def _communication(path, targets):
    model = load(path, lora(targets), is_cut=True)
    batch = batches(1)[0]
    model(**batch).loss.backward()  # the first backward pays for nothing that later ones do not
    outputs = []
    forward = count_collectives(lambda: outputs.append(model(**batch)))
    return forward, count_collectives(lambda: outputs[0].loss.backward())


@pytest.mark.parametrize(
    ("tp_size", "targets"),
    [pytest.param(2, "query", marks=pytest.mark.slow), (3, "all-linear")],
)
def test_each_collective_of_a_layer_is_two_halves(world_of, checkpoint, tp_size, targets):
    """Whatever of it is adapted."""
    layers = 4
    path = checkpoint("llama", num_hidden_layers=layers, **CUT)
    for forward, backward in world_of(tp_size).run(_communication, path, targets):
        # The decoder's output is gathered as well, and the statistics of the head; the embedding.
        wanted = {"all_gather": 2 * layers + 2, "reduce_scatter": 2 * layers, "all_reduce": 1}
        assert forward == wanted
        # The first layer's q, k and v read a frozen embedding; the head's input, and the bucket.
        wanted = {"all_gather": 2 * layers, "reduce_scatter": 2 * layers - 1, "all_reduce": 2}
        assert backward == wanted
