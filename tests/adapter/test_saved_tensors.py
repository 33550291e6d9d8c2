"""What a layer keeps for backward: x once and x A^T; a frozen one, nothing that is not its weight.

A frozen linear needs W alone for dx = dy W. One process is enough: shards on the meta device, in a
group whose collectives send nothing; quantised ones are real.
"""

import pytest
import torch
from peft import LoraConfig
from torch.autograd.graph import saved_tensors_hooks

from tests.quantized import quantization, write_wide
from tests.tiny import tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.plan.build import build_plan
from tplora.upstream import local_shard
from tplora.upstream.rehearsal import build_cut_meta_model, ranks_without_peers

R, ROWS = 3, 5
LINEARS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
IS_ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")


def _lora(**settings):
    given = {"r": R, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**given | settings)


@pytest.fixture
def shards():
    """``shards(settings)``: rank 0's part of a tiny Llama over two ranks, adapted."""
    with ranks_without_peers(2):
        yield _cut_model


def _cut_model(*, name="llama", dtype=torch.bfloat16, **settings):
    config, adapter = tiny_config(name), _lora(**settings)
    base = build_cut_meta_model(config, tp_size=2, dtype=dtype, styles={})
    base.requires_grad_(requires_grad=False)
    plan = build_plan(config, adapter, tp_size=2, dtype=str(dtype).removeprefix("torch."))
    return attach_adapter(base, adapter, plan=plan).train()


def _kept(model, modules, x):
    """Size and dtype of what the modules keep of ``x``, beside what the model holds anyway."""
    held = {_storage(p) for p in (*model.parameters(), *model.buffers())}
    held |= {_storage(factor.local()) for factor in model.factors().values()}
    found = {}

    def pack(tensor):
        if _storage(tensor) not in held:
            found[_storage(tensor)] = (tensor.numel(), tensor.dtype)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [module(x) for module in modules]
    assert all(y.requires_grad for y in outputs)
    return sorted(found.values(), key=str)


def _storage(tensor):
    return local_shard(tensor).untyped_storage()._cdata


def _input(module, name, *, ranks=1, dtype=torch.bfloat16, device="meta"):
    width = module.in_features // (ranks if name in IS_ROW_PARALLEL else 1)
    return torch.ones(1, ROWS, width, dtype=dtype, device=device, requires_grad=True)


def _layer(model):
    return model.get_base_model().model.layers[0]


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_without_an_adapter_keeps_nothing_but_its_weight(shards, name):
    model = shards(target_modules=["k_proj"])
    module = _layer(model).get_submodule(name)
    assert _kept(model, [module], _input(module, name, ranks=2)) == []


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_adapted_linear_keeps_its_input_and_what_b_multiplies(shards, name, dropout):
    """The input in the base's dtype, though the factors are float32; of a mask a byte a number."""
    model = shards(lora_dropout=dropout)
    module = _layer(model).get_submodule(name)
    x = _input(module, name, ranks=2)
    wanted = [(x.numel(), torch.bfloat16), (ROWS * R, torch.float32)]
    wanted += [(x.numel(), torch.bool)] if dropout else []
    assert _kept(model, [module], x) == sorted(wanted, key=str)


def test_layers_that_read_one_input_keep_it_once(shards):
    model = shards()
    modules = [_layer(model).get_submodule(f"self_attn.{k}_proj") for k in "qkv"]
    x = _input(modules[0], "q_proj")
    down = (ROWS * R, torch.float32)
    assert _kept(model, modules, x) == sorted([(x.numel(), x.dtype), *[down] * 3], key=str)


@pytest.mark.parametrize("method", ["nf4-double", "int8"])
@pytest.mark.parametrize("name", LINEARS)
def test_quantised_linears_keep_no_more_than_whole_ones(quantised, method, name):
    model = quantised(method)
    layer = _layer(model)
    alone = "mlp.gate_proj"
    module = layer.get_submodule(alone)
    x = _input(module, alone, dtype=torch.float32, device="cpu")
    assert _kept(model, [module], x) == []
    module = layer.get_submodule(name)
    x = _input(module, name, dtype=torch.float32, device="cpu")
    wanted = [(x.numel(), torch.float32), (ROWS * R, torch.float32)]
    assert _kept(model, [module], x) == sorted(wanted, key=str)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    path, loaded = write_wide("llama", tmp_path_factory.mktemp("quantised") / "llama"), {}

    def get(method):
        if method not in loaded:
            given = {"quantization_config": quantization(method), "dtype": torch.float32}
            targets = [name.rpartition(".")[2] for name in LINEARS]
            base = load_base(str(path), tp_size=1, **given)
            loaded[method] = attach_adapter(base, _lora(target_modules=targets)).train()
        return loaded[method]

    return get


def test_the_hooks_see_a_copy_that_is_kept(shards, monkeypatch):
    """The autograd of a cast and a product keeps the cast input."""
    monkeypatch.setattr("tplora.adapter.linear.can_project_down", lambda *_: False)
    model = shards()
    module = _layer(model).get_submodule("self_attn.q_proj")
    x = _input(module, "q_proj")
    assert (x.numel(), torch.float32) in _kept(model, [module], x)
