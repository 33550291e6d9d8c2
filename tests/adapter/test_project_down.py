"""What an adapter keeps for backward, in bytes; and that it computes what it did."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.models import CUT, batches, load, lora, world_size
from tplora.adapter import linear
from tplora.adapter.dropout import ShardedDropout
from tplora.adapter.linear import TploraLinear
from tplora.adapter.project_down import project_down

R = 4


def _given(dtype, factor_dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 12, generator=generator).to(dtype).requires_grad_()
    a = torch.randn(R, 12, generator=generator).to(factor_dtype).requires_grad_()
    return x, a, torch.randn(2, 5, R, generator=generator).to(factor_dtype)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_is_bit_for_bit_the_cast_dropout_and_product(dtype, p):
    found = []
    for is_ours in (True, False):
        torch.manual_seed(3)
        dropout = ShardedDropout(p, in_features=12, mesh=None) if p else nn.Identity()
        x, a, dy = _given(dtype, torch.float32 if dtype == torch.bfloat16 else dtype)
        y = project_down(x, a, dropout) if is_ours else F.linear(dropout(x.to(a.dtype)), a)
        y.backward(dy)
        found.append((y.detach(), x.grad, a.grad))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of distinct storages that are kept for backward while it is open."""

    def __init__(self):
        self.storages = {}
        super().__init__(self._keep, lambda tensor: tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _keep(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def _kept_bytes(path, dropout, is_disabled):
    """Of activations: what the model holds anyway is left out."""
    model = load(path, lora("all-linear", r=R, dropout=dropout), dtype=torch.bfloat16)
    layers = [m for m in model.modules() if isinstance(m, TploraLinear)]
    held = {p.untyped_storage().data_ptr() for p in _tensors_of(model)}
    model.get_base_model().enable_input_require_grads()
    if is_disabled:
        model.base_model.disable_adapter_layers()
    batch = batches(1)[0]
    with _Kept() as kept:
        model(**batch)
    widths = {f"{m.plan.name}": m.plan.weight for m in layers}
    num_bytes = sum(size for place, size in kept.storages.items() if place not in held)
    return num_bytes, batch["input_ids"].numel(), widths


def _tensors_of(model):
    factors = [f.local() for f in model.factors().values()]
    local = (getattr(p, "_local_tensor", p) for p in model.parameters())
    return [*factors, *local, *model.buffers()]


def _allowed(tokens, widths, dropout):
    """For each input that is read, x in bfloat16 once; for each layer x A^T, and a mask."""
    inputs, layers = {}, 0
    for name, weight in widths.items():
        width = weight.shape[1] // (world_size() if weight.shard_dim == 1 else 1)
        reads = name.rsplit(".", 1)[0] if weight.shard_dim != 1 else name
        inputs[reads] = 2 * tokens * width
        layers += 4 * tokens * R + (tokens * width if dropout else 0)
    return sum(inputs.values()) + layers


def _extra(path, dropout):
    without, *_ = _kept_bytes(path, dropout, True)
    found, tokens, widths = _kept_bytes(path, dropout, False)
    return found - without, _allowed(tokens, widths, dropout)


@pytest.mark.world
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_adapter_keeps_its_input_once_and_what_r_is_wide(world2, checkpoint, dropout):
    for extra, allowed in world2.run(_extra, checkpoint("llama", **CUT), dropout):
        assert 0 < extra <= allowed


def _extra_by_autograd(path, dropout):
    with mock.patch.object(linear, "can_project_down", return_value=False):
        return _extra(path, dropout)


@pytest.mark.world
def test_the_count_sees_copies(world2, checkpoint):
    for extra, allowed in world2.run(_extra_by_autograd, checkpoint("llama", **CUT), 0.0):
        assert extra > 1.5 * allowed


def _kept_by_frozen(path):
    """Storages that the frozen products keep beside weights."""
    model = load(path, lora("all-linear", r=R), dtype=torch.float32)
    model.base_model.disable_adapter_layers()
    held = {p.untyped_storage().data_ptr() for p in _tensors_of(model)}
    found = []
    for layer in (m for m in model.modules() if isinstance(m, TploraLinear)):
        rows, weight = (2, 3), layer.plan.weight
        width = weight.shape[1] // (world_size() if weight.shard_dim == 1 else 1)
        x = torch.randn(*rows, width, requires_grad=True)
        with _Kept() as kept:
            layer(x)
        found += [size for place, size in kept.storages.items() if place not in held]
    return found


@pytest.mark.world
def test_a_frozen_layer_keeps_its_weight_alone(world2, checkpoint):
    assert world2.run(_kept_by_frozen, checkpoint("llama", **CUT)) == [[], []]
