"""A run at tp_size N is the run at tp_size 1: whole models, ten steps, every number."""

import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.broken import BREAKS, MODELS
from tests.communication import count_collectives
from tests.models import (
    CUT,
    STEPS,
    Case,
    batches,
    compare_run,
    differences,
    load,
    load_plain,
    lora,
    world_size,
)
from tests.parity import assert_same_on_all_ranks
from tests.world import World
from tplora.base.load import load_base

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def world3():
    with World(3) as world:
        yield world


@pytest.fixture
def world(request):
    """The world of the size asked for; all sizes live side by side, in any order of tests."""
    return request.getfixturevalue(f"world{request.param}")


def _on(**names_by_world):
    """Which model runs on how many ranks: ``_on(world2=("llama",))``."""
    pairs = [
        pytest.param(int(world.removeprefix("world")), name, id=f"{world}-{name}")
        for world, names in names_by_world.items()
        for name in names
    ]
    return pytest.mark.parametrize(("world", "name"), pairs, indirect=["world"])


on_2_and_3 = pytest.mark.parametrize("world", [2, 3], indirect=True)


def _run_equals_the_run_alone(path, case, file):
    model = compare_run(path, case, file)
    assert model.sync.num_buckets == STEPS * (2 if case.is_reduced_each_backward else 1)
    for name, factor in model.factors().items():
        if factor.plan.shard_dim is None:
            assert_same_on_all_ranks(tensor=factor.parameter, what=name)


FAMILIES = ("llama_bias", "qwen3", "phi3", "olmo2", "qwen2_tied")
"""Each family once; Llama with biases, which a row-parallel layer must add once."""


@_on(world2=FAMILIES, world3=("qwen3", "phi3"))
def test_ten_steps_equal_plain_peft(world, recorded, name):
    path, file = recorded(name, Case())
    world.run(_run_equals_the_run_alone, path, Case(), file)


@_on(world2=FAMILIES, world3=FAMILIES, world4=FAMILIES)
def test_ten_steps_with_dropout_equal_one_process(world, recorded, name):
    case = Case(dropout=0.3)
    path, file = recorded(name, case)
    world.run(_run_equals_the_run_alone, path, case, file)


@_on(world2=("llama", "phi3", "qwen2_tied"), world3=("qwen2_tied",))
def test_adapters_on_head_and_embedding_equal_plain_peft(world, recorded, name):
    path, file = recorded(name, Case("ends"))
    world.run(_run_equals_the_run_alone, path, Case("ends"), file)


@_on(world2=("llama", "phi3"), world3=("olmo2",))
def test_an_adapter_among_layers_that_transformers_runs_equals_plain_peft(world, recorded, name):
    case = Case("fused-query" if name == "phi3" else "query")
    path, file = recorded(name, case)
    world.run(_run_equals_the_run_alone, path, case, file)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (3, Case("patterns")),
        (2, Case("ends", dropout=0.3)),
        (2, Case(is_reduced_each_backward=True)),
        (2, Case(checkpointing="reentrant", dropout=0.3)),
        (3, Case(checkpointing="non-reentrant", dropout=0.3)),
        (2, Case(checkpointing="keeping", dropout=0.3)),
        (3, Case(checkpointing="keeping")),
    ],
    indirect=["world"],
    ids=str,
)
def test_settings_of_lora_and_of_the_run_equal_the_run_alone(world, recorded, case):
    path, file = recorded("llama", case)
    world.run(_run_equals_the_run_alone, path, case, file)


def _half_precision_is_no_worse_than_alone(path):
    config = {"init_lora_weights": False}  # so that no gradient is zero
    batch = batches(1)[0]

    def run(model):
        model.eval()
        outputs = model(**batch)
        outputs.loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        return {"logits": outputs.logits.detach()} | grads

    rounded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    exact = load_plain(path, lora(**config), dtype=torch.float32)
    for name, parameter in exact.get_base_model().named_parameters():
        if not parameter.requires_grad:
            parameter.data = rounded.get_parameter(name.replace(".base_layer", "")).data.float()
    truth = run(exact)
    alone = run(load_plain(path, lora(**config), dtype=torch.bfloat16))
    model = load(path, lora(**config), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    found = run(model)
    off = {"alone": 0.0, "here": 0.0}
    for name, wanted in truth.items():
        whole = found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name]
        errors = [float((t.float() - wanted).norm() / wanted.norm()) for t in (alone[name], whole)]
        off["alone"] += errors[0] / len(truth)
        off["here"] += errors[1] / len(truth)
        assert errors[1] <= 2 * errors[0] + 0.02, f"{name}: {errors[1]:.3g}, alone {errors[0]:.3g}"
    assert off["alone"] > 0, "bfloat16 rounds nothing"
    assert off["here"] <= 2 * off["alone"], off


@on_2_and_3
def test_bfloat16_is_at_most_twice_as_far_from_the_truth_as_in_one_process(world, checkpoint):
    world.run(_half_precision_is_no_worse_than_alone, checkpoint("llama", **CUT))


def _communication(path, targets):
    model = load(path, lora(targets))
    batch = batches(1)[0]
    model(**batch).loss.backward()  # the first backward pays for nothing that later ones do not
    outputs = []
    forward = _count(lambda: outputs.append(model(**batch)))
    backward = _count(lambda: outputs[0].loss.backward())
    bare = load_base(path, tp_size=world_size(), dtype=torch.float64)
    return forward, backward, _count(lambda: bare(**batch)), model.sync.num_buckets


def _count(fn):
    found = count_collectives(fn)
    found.pop("wrap_tensor_autograd", None)  # of functional collectives; it moves nothing
    return found


@on_2_and_3
def test_a_decoder_layer_takes_two_collectives_each_way_and_the_adapter_adds_none(
    world, checkpoint
):
    layers = 4
    path = checkpoint("llama", num_hidden_layers=layers, **CUT)
    for forward, backward, bare, num_buckets in world.run(_communication, path, "all-linear"):
        assert forward == {"all_reduce": 2 * layers + 1, "all_gather": 1}  # embedding; head
        assert forward == bare
        # The head's input adds one; the first layer's q, k and v read a frozen embedding, which
        # saves one; the bucket comes last.
        assert backward == {"all_reduce": 2 * layers + 1 - 1 + 1}
        assert num_buckets == 2  # two backward passes, each the last of its step


def _save(path, case, folder):
    model = load(path, lora(case.targets, dropout=case.dropout), is_cut=case.is_cut)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        batch, optimizer = batches(1)[0], torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    model.save_pretrained(folder)
    return model.eval()(**batch).logits.detach().numpy()


def _plain_logits(path, folder):
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    plain = PeftModel.from_pretrained(base, folder)
    return plain(**batches(1)[0]).logits.detach().numpy()


@on_2_and_3
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", "all-linear"), ("phi3", "all-linear"), ("llama", "ends"), ("qwen2_tied", "ends")],
)
def test_a_saved_adapter_equals_that_of_one_process_and_plain_peft_runs_it(
    world, alone, checkpoint, tmp_path, name, targets
):
    path, case = checkpoint(name, **CUT), Case(targets, dropout=0.3, is_cut=name == "phi3")
    here, there = tmp_path / "here", tmp_path / "there"
    logits = world.run(_save, path, case, here)[0]
    alone.run(_save, path, case.alone(), there)

    found, wanted = (load_file(folder / "adapter_model.safetensors") for folder in (here, there))
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=key)
    assert (here / "adapter_config.json").read_text() == (there / "adapter_config.json").read_text()

    again = alone.run(_plain_logits, path, here)[0]
    assert abs(again - logits).max() < 1e-6


def _broken_run(path, case, file, what):
    with BREAKS[what][1]():
        return differences(path, case, file)


@pytest.mark.parametrize("what", BREAKS)
def test_parity_sees(world2, recorded, what):
    case, _, seen_as = BREAKS[what]
    path, file = recorded(MODELS.get(what, "llama"), case)
    found = world2.run(_broken_run, path, case, file, what)
    assert any(re.match(seen_as, line) for lines in found for line in lines), found


def test_parity_sees_nothing_in_a_run_that_is_not_broken(world2, recorded):
    path, file = recorded("llama", Case("ends"))
    assert world2.run(differences, path, Case("ends"), file) == [[], []]
