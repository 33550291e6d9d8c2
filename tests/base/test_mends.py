"""What transformers gets wrong when it cuts a model is right after ``load_base``.

Each model against itself in one process, in training mode, ranks seeded differently: weights, and
for three batches loss, logits and the gradient at the embedding's output. Many of these models
compute parts in float32, hence the tolerances of gradients.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.world import World
from tests.zoo.build import VOCAB, build_model, tiny_config
from tplora.base import mends, verify
from tplora.base.load import load_base
from tplora.base.mends import MENDS
from tplora.collectives.raw import all_reduce
from tplora.errors import ShardError
from tplora.upstream import expanded_tp_plan

pytestmark = pytest.mark.world

# llama4 is llama4_text loaded from the whole class; the other two need no mend.
MODELS = sorted({*MENDS, "llama4", "phi4_multimodal", "phimoe"})
OPTIONS = {"dtype": torch.float64, "experts_implementation": "eager"}
# Heads that 3 divides; some configs want the hidden size to be a multiple of them.
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3}
WIDE = {"num_attention_heads": 6, "hidden_size": 96}
THREE_OF = {"gemma3n_text": THREE | WIDE, "hrm_text": WIDE}


def _rtol(model_type: str) -> dict[str, float]:
    # The inklings sum what their experts give in float32.
    logits = 1e-5 if model_type.startswith("inkling") else 1e-10
    return {"loss": 1e-6, "logits": logits, "gradient": 1e-5}


@pytest.fixture(scope="module")
def world3():
    with World(3) as world:
        yield world


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(model_type, **changes)`` is the path of a tiny checkpoint, written once."""
    folder, written = tmp_path_factory.mktemp("bases"), {}

    def get(model_type, **changes):
        key = (model_type, *sorted(changes.items()))
        if key not in written:
            config = tiny_config(model_type)
            for name, value in changes.items():
                setattr(config, name, value)
            written[key] = str(folder / f"{model_type}-{len(written)}")
            build_model(model_type, config).save_pretrained(written[key])
        return written[key]

    return get


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _other_weights(model, truth):
    wanted = dict(truth.named_parameters())
    found = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def _forward_backward(model, ids, mask, seed):
    """Loss, logits, and the gradient at the output of the embedding."""
    leaves = []

    def cut_the_graph(module, args, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.get_input_embeddings().register_forward_hook(cut_the_graph)
    torch.manual_seed(seed)  # phimoe's router samples
    labels = ids.masked_fill(mask == 0, -100)
    output = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
    output.loss.backward()
    hook.remove()
    logits = _whole(output.logits.detach())
    return {"loss": output.loss.detach(), "logits": logits, "gradient": leaves[0].grad}


def _batches():
    draw = torch.Generator().manual_seed(5)
    for shape, num_padded in (((4, 16), 5), ((4, 16), 0), ((3, 15), 2)):
        ids = torch.randint(3, VOCAB, shape, generator=draw)
        mask = torch.ones_like(ids)
        mask[1, mask.shape[1] - num_padded :] = 0
        yield ids, mask


def _difference(path: str, model_type: str) -> str:
    """The first thing in which the loaded base is not the one of one process, or nothing."""
    try:
        model = load_base(path, tp_size=dist.get_world_size(), **OPTIONS).train()
    except (ShardError, RuntimeError) as error:
        return f"cannot be loaded: {error}"
    truth = AutoModelForCausalLM.from_pretrained(path, **OPTIONS).train()
    truth.requires_grad_(requires_grad=False)
    if names := _other_weights(model, truth):
        return f"other weights: {names}"
    for step, (ids, mask) in enumerate(_batches()):
        wanted = _forward_backward(truth, ids, mask, step)
        try:
            found = _forward_backward(model, ids, mask, step)
        except RuntimeError as error:
            return f"step {step} raises: {error}"
        for what, rtol in _rtol(model_type).items():
            error = float((found[what] - wanted[what]).norm() / wanted[what].norm())
            if not error < rtol:
                return f"step {step}: {what} is {error:.2g} off"
    return ""


@pytest.mark.parametrize("model_type", MODELS)
def test_a_cut_base_is_the_base_of_one_process(world2, saved, model_type):
    assert world2.run(_difference, saved(model_type), model_type) == ["", ""]


def _answers(path: str) -> None:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))
    models = (
        load_base(path, tp_size=2, **OPTIONS),
        AutoModelForCausalLM.from_pretrained(path, **OPTIONS),
    )
    found, wanted = (
        model.eval().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for model in models
    )
    assert torch.equal(found, wanted)


# Without gradients transformers takes other ways through its cut layers.
@pytest.mark.parametrize("model_type", sorted(MENDS))
def test_it_answers_as_one_process_does(world2, saved, model_type):
    world2.run(_answers, saved(model_type))


@pytest.mark.parametrize(
    "model_type", ["doge", "gemma3n_text", "hrm_text", "llama4_text", "phimoe", "sarvam_moe"]
)
def test_so_it_is_in_three_uneven_pieces(world3, saved, model_type):
    path = saved(model_type, **THREE_OF.get(model_type, THREE))
    assert world3.run(_difference, path, model_type) == [""] * 3


@pytest.mark.parametrize("model_type", ["inkling_text", "inkling2_text"])
def test_experts_are_too(world3, saved, model_type):
    assert world3.run(_difference, saved(model_type), model_type) == [""] * 3


def test_doge_with_experts_is_itself(world2, saved):
    path = saved("doge", is_moe=True, num_experts=16, num_experts_per_tok=2)
    assert world2.run(_difference, path, "doge") == ["", ""]


@contextlib.contextmanager
def _set(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_mends(path: str, model_type: str) -> str:
    with _set(mends, "MENDS", {}):
        return _difference(path, model_type)


# When this fails for a model, transformers has become right: take its mend out.
@pytest.mark.parametrize("model_type", sorted(MENDS))
def test_transformers_alone_still_gets_it_wrong(world2, saved, model_type):
    assert all(world2.run(_without_mends, saved(model_type), model_type))


def _with(name: str, path: str, model_type: str) -> str:
    broken = {
        "split_last_dim": lambda x, group: x.chunk(2, -1)[dist.get_rank(group)],
        "replicate_input": lambda x, group: x,
        "reduce_partial": lambda x, group: x + 0 * all_reduce(x.detach(), group),
        "_queries_keys_values": lambda fused, first: [first, first, fused - 2 * first],
    }
    mend = MENDS[model_type]
    with contextlib.ExitStack() as stack:
        if mend.fused_sizes is not None:
            changed = mends.Mend(fault="", fused_sizes=broken[name])
            stack.enter_context(_set(mends, "MENDS", {model_type: changed}))
        else:
            stack.enter_context(_set(mends, name, broken[name]))
        return _difference(path, model_type)


@pytest.mark.parametrize(
    ("model_type", "broken"),
    [
        ("doge", "split_last_dim"),
        ("gemma3n_text", "replicate_input"),
        ("gemma3n_text", "reduce_partial"),
        ("inkling_text", "replicate_input"),
        ("sarvam_moe", "_queries_keys_values"),
    ],
)
def test_a_mend_that_leaves_something_out_is_seen(world2, saved, model_type, broken):
    found = world2.run(_with, broken, saved(model_type), model_type)
    assert any(found), found


def test_one_process_is_left_alone(saved):
    for model_type in ("gemma3n_text", "llama4_text"):
        model = load_base(saved(model_type), tp_size=1, **OPTIONS)
        plain = AutoModelForCausalLM.from_pretrained(saved(model_type), **OPTIONS)
        for one, other in zip(model.modules(), plain.modules(), strict=True):
            assert one.__dict__.keys() == other.__dict__.keys()
            assert len(one._forward_hooks) == len(other._forward_hooks)


def _odd_experts(path: str) -> None:
    with pytest.raises(ShardError, match=r"tp_size = 2: .*66 rows.*pieces of 33.*divides 33"):
        load_base(path, tp_size=2, **OPTIONS)


def test_a_cut_that_parts_a_gate_row_from_its_up_row_is_refused(world2, saved):
    world2.run(_odd_experts, saved("inkling2_text", moe_intermediate_size=33))


def _plain_experts(path: str) -> None:
    with pytest.raises(ShardError, match=r"inkling2_text: .*not in the published form"):
        load_base(path, tp_size=2, **OPTIONS)


def test_experts_in_another_form_are_refused(world2, tmp_path):
    build_model("inkling2_text").save_pretrained(tmp_path, save_original_format=False)
    world2.run(_plain_experts, str(tmp_path))


def _styles(path: str) -> None:
    model = load_base(path, tp_size=2, **OPTIONS)
    styles = expanded_tp_plan(model)
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            assert styles[name] == "packed_colwise"
            assert parameter.placements[-1].split_factor == 2
    assert styles["model.embed_tokens"] == "replicate"


@pytest.mark.parametrize("model_type", ["inkling_text", "inkling2_text", "inkling2_loop_text"])
def test_a_plan_reads_the_styles_that_a_loaded_base_has(world2, saved, model_type):
    world2.run(_styles, saved(model_type))


def test_every_mend_says_what_it_is_for():
    assert all(mend.fault for mend in MENDS.values())
    assert verify.__doc__
