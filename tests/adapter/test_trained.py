"""What is trained of the base itself, on shards, is what plain PEFT trains in one process."""

import re
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.adapter import beside
from tests.merging import merge_one
from tests.models import CUT, SEED, batches, load, load_plain, lora
from tests.parity import assert_is_shard
from tplora.adapter.attach import attach_adapter
from tplora.adapter.gradients import GradientSync
from tplora.adapter.load import load_factors
from tplora.adapter.local_module import LocalModule
from tplora.adapter.tokens import TploraTokens
from tplora.base.load import load_base
from tplora.errors import PlanError, ShardError

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def recorded(alone, checkpoint, tmp_path_factory):
    """The checkpoint's path, the case and the file of plain PEFT's run alone, made once."""
    folder, files = tmp_path_factory.mktemp("alone"), {}

    def get(name):
        model, changes, case = beside.RUNS[name]
        path = checkpoint(model, **changes)
        if name not in files:
            files[name] = folder / f"{name}.safetensors"
            alone.run(beside.record, path, case, files[name])
        return path, case, files[name]

    return get


RUNS = [
    *((2, name) for name in beside.RUNS),
    *((3, name) for name in beside.RUNS if name not in beside.ON_TWO),
]


@pytest.mark.parametrize(("size", "name"), RUNS)
def test_ten_steps_equal_plain_peft(world_of, recorded, size, name):
    world_of(size).run(beside.compare, *recorded(name))


@pytest.mark.parametrize("name", beside.RUNS)
def test_plain_peft_reads_the_saved_adapter(world_of, alone, checkpoint, tmp_path, name):
    """With the adapter, without it, merged, merged file by file; the file is one process's."""
    model, changes, case = beside.RUNS[name]
    path = checkpoint(model, **changes)
    wanted, bare = world_of(2).run(beside.save, path, case, tmp_path / "two")[0]
    alone.run(beside.save, path, case, tmp_path / "one")
    # peft writes what is trained of one half into the weight of both
    can_merge = name not in ("tokens-tied-but-other-tokens", "tokens-tied-head-alone")
    found, without, merged = alone.run(beside.reload_plain, path, tmp_path / "two", can_merge)[0]
    merge_one(path, tmp_path / "two", tmp_path / "merged")
    in_files = alone.run(beside.logits_of, tmp_path / "merged")[0]
    pairs = ((found, wanted), (without, bare), (merged, wanted), (in_files, wanted))
    for one, other in pairs:
        assert abs(one - other).max() < 1e-11
    assert abs(wanted - bare).max() > 1e-3
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def _read_back(path, case, folder):
    model = beside.filled(path, case)
    wanted = {name: factor.full().clone() for name, factor in model.factors().items()}
    model.save_pretrained(folder)
    for factor in model.factors().values():
        factor.parameter.data.zero_()
    load_factors(model, folder)
    for name, factor in model.factors().items():
        assert torch.equal(factor.full(), wanted[name]), name


@pytest.mark.parametrize("name", ["modules-tied-together", "tokens-tied", "bias-all"])
def test_what_was_saved_is_read_back(world2, checkpoint, tmp_path, name):
    model, changes, case = beside.RUNS[name]
    world2.run(_read_back, checkpoint(model, **changes), case, tmp_path / "adapter")


def _for_inference(path, case):
    model = load(path, lora(case.targets, **case.changes | {"inference_mode": True}))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not beside.logits(model).requires_grad


@pytest.mark.parametrize("name", ["modules-head", "tokens-tied", "bias-all"])
def test_nothing_is_trained_for_inference(world2, checkpoint, name):
    model, changes, case = beside.RUNS[name]
    world2.run(_for_inference, checkpoint(model, **changes), case)


FIRST = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}
SECOND = {"target_modules": ["v_proj"], "trainable_token_indices": [3, 100, 126]}


def _two(path, *, is_plain):
    first, second = lora(**FIRST), lora(**SECOND)
    model = load_plain(path, first) if is_plain else load(path, first)
    model.add_adapter("second", second)
    own = {} if is_plain else model.factors() | model.factors("second")
    generator = torch.Generator().manual_seed(5)
    for name, parameter in sorted(model.named_parameters()):
        if ".default" in name or ".second" in name:
            full = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4
            parameter.data.copy_(full if is_plain else own[name].piece_of(full))
    return model


def _over_trained_biases(path):
    """A second adapter, on and around modules whose biases the first one trains."""
    found = []
    for is_plain in (False, True):
        first = lora("query", bias="all")
        second = lora("query", target_modules=["v_proj"], modules_to_save=["k_proj"])
        model = load_plain(path, first) if is_plain else load(path, first)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.add_(0.5)
        model.add_adapter("second", second)  # A may be any: B is zero
        model.set_adapter("second")
        found.append(beside.logits(model))
    assert_is_shard(shard=found[0], full=found[1], dim=None, what="logits", atol=1e-5)


def test_a_second_adapter_sees_the_biases_that_the_first_trains(world2, checkpoint):
    world2.run(_over_trained_biases, checkpoint("llama_bias", **CUT))


def _switched(path):
    """One after the other is trained on; then the first is gone."""
    ours, plain = _two(path, is_plain=False), _two(path, is_plain=True)
    for name in ("second", "default"):
        for model in (ours, plain):
            model.set_adapter(name)
            model.zero_grad()
            model(**batches(1)[0]).loss.backward()
        wanted = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
        assert wanted.keys() == ours.factors(name).keys()
        for key, factor in ours.factors(name).items():
            assert_is_shard(
                shard=factor.parameter.grad,
                full=wanted[key],
                dim=factor.plan.shard_dim,
                what=f"{name}: {key}",
                atol=1e-6,  # norms and loss are float32 here
            )
    for model in (ours, plain):
        model.delete_adapter("default")
        model.set_adapter("second")
    found, wanted = beside.logits(ours), beside.logits(plain)
    assert_is_shard(shard=found, full=wanted, dim=None, what="logits", atol=1e-5)
    assert not ours.factors("default")


def test_adapters_are_switched_and_deleted_as_in_plain_peft(world2, checkpoint):
    world2.run(_switched, checkpoint("llama", **CUT))


def _beside_another(path):
    """PEFT takes the copy of a head that another adapter trains for one more linear layer."""
    model = load(path, lora("query", modules_to_save=["lm_head", "o_proj"]))
    for changes, words in (
        ({"target_modules": ["o_proj"]}, "o_proj is trained itself by another adapter"),
        ({"modules_to_save": ["0.self_attn.q_proj"], "target_modules": ["k_proj"]}, "q_proj is to"),
        ({"trainable_token_indices": {"lm_head": [3]}}, "lm_head is to be trained, and is"),
    ):
        with pytest.raises(PlanError, match=words):
            model.add_adapter("second", lora("query", **changes))
    model.add_adapter("second", lora("all-linear", exclude_modules=["o_proj"]))
    names = {name.split(".lora_")[0].split(".")[-1] for name in model.factors("second")}
    assert names == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    named = model.peft_config["second"].target_modules
    assert {name.split(".")[-1] for name in named} == names


def test_a_second_adapter_is_put_on_the_base_alone(world2, checkpoint):
    world2.run(_beside_another, checkpoint("llama", **CUT))


def _second_bias(path):
    model = load(path, lora("query"))
    with pytest.raises(PlanError, match="peft never trains the biases of an adapter that is added"):
        model.add_adapter("second", lora("query", bias="all"))
    model = load(path, lora("query", bias="all"))
    with pytest.raises(PlanError, match="changed the base's weights, which would stay so"):
        model.delete_adapter("default")


def test_biases_of_a_second_adapter_are_refused_and_those_of_the_first_stay(world2, checkpoint):
    world2.run(_second_bias, checkpoint("llama_bias", **CUT))


def _differing_copies(path):
    base = load_base(path, tp_size=dist.get_world_size(), dtype=torch.float64)
    with torch.no_grad():
        base.model.norm.weight.add_(dist.get_rank())
    with pytest.raises(ShardError, match=r"norm.*differs between the ranks.*set_seed"):
        attach_adapter(base, lora("query", modules_to_save=["model.norm"]), seed=SEED)


def test_ranks_that_hold_other_weights_are_refused(world2, checkpoint):
    world2.run(_differing_copies, checkpoint("llama", **CUT))


class _Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Shapes that were made while open, larger than this rank's piece of W in nothing else."""

    def __init__(self, size):
        self.size, self.num_found = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        is_new = isinstance(made, torch.Tensor) and "detach" not in func.__name__
        self.num_found += is_new and tuple(made.shape) == self.size and "view" not in func.__name__
        return made


def _copies_of_weight(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load(path, lora("query", trainable_token_indices=[3, 100])).eval()
    weight = model.get_base_model().model.embed_tokens.token_adapter.base_layer.weight
    with torch.no_grad(), _Copies(tuple(weight.to_local().shape)) as mode:
        model(**batches(1)[0])
    return mode.num_found


def test_no_forward_copies_the_weight_of_trained_tokens(world2, checkpoint):
    assert world2.run(_copies_of_weight, checkpoint("qwen2_tied", **CUT)) == [0, 0]


# ---- each broken on purpose


def _no_bucket():
    return mock.patch.object(GradientSync, "_reduce")


def _bias_on_every_rank():
    """A row-parallel bias is added before the sum."""
    own = LocalModule._linear

    def linear(self, x):
        y, bias = own(self, x), self.tensor("bias")
        is_row = self.plan.weight.shard_dim == 1 and bias is not None
        return y + bias * (self.mesh.size() - 1) if is_row else y

    return mock.patch.object(LocalModule, "_linear", linear)


def _rows_on_every_rank():
    """Every rank answers with the trained rows, whoever holds the token."""
    return mock.patch.object(
        TploraTokens, "vocab_range", property(lambda self: (0, self.plan.weight.shape[0]))
    )


def _head_does_not_follow():
    return mock.patch("tplora.adapter.head.projection._trained_tokens", return_value=[])


def _padding_is_trained():
    own = torch.nn.functional.embedding

    def embedding(*args, padding_idx=None, **settings):
        return own(*args, **settings)

    return mock.patch("torch.nn.functional.embedding", embedding)


@pytest.mark.parametrize(
    ("name", "broken", "seen_as"),
    [
        ("modules-norms", _no_bucket, "step 1: grad of .*q_norm"),
        ("tokens-tied", _no_bucket, "step 1: grad of .*trainable_tokens_delta"),
        ("bias-all", _bias_on_every_rank, "step 1: loss 0"),
        ("tokens-tied", _head_does_not_follow, "step 1: grad of .*trainable_tokens_delta"),
        ("tokens-scaled", _padding_is_trained, "step 1: grad of .*trainable_tokens_delta"),
    ],
    ids=lambda part: part.__name__ if callable(part) else part.split(":")[0],
)
def test_parity_sees(world2, recorded, name, broken, seen_as):
    found = world2.run(beside.differ, *recorded(name), broken)
    assert any(re.match(seen_as, line) for lines in found for line in lines), found
