"""Trained embeddings and tokens of every cut, one layer at a time, against plain torch and PEFT.

No model that is loaded here cuts its embedding on the hidden size, so that has no whole run.
"""

import pytest
import torch
import torch.distributed as dist
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tplora.adapter.factor import Factor
from tplora.adapter.gradients import GradientSync
from tplora.adapter.local_module import LocalModule
from tplora.adapter.tokens import TploraTokens
from tplora.collectives.shared_input import SharedInput
from tplora.plan.facts import PartFacts
from tplora.plan.style import shard_range
from tplora.plan.tokens import plan_token_rows
from tplora.plan.trained import place_parameter, plan_part, style_of

pytestmark = pytest.mark.world

VOCAB, HIDDEN = 127, 7
TRAINED = [5, 0, 126, 63, 64]
STYLES = ["embedding_rowwise", "embedding_colwise", None]


class Scaled(nn.Embedding):
    """As Gemma has it."""

    embed_scale = 2.5

    def forward(self, tokens):
        return super().forward(tokens) * self.embed_scale


def _full(*shape, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _tokens():
    drawn = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(2))
    drawn[0, :4] = torch.tensor([0, 126, 5, 5])
    return drawn


def _module(cls, weight, **settings):
    module = cls(VOCAB, HIDDEN, dtype=torch.float64, **settings)
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return module


def _cut(module, style, mesh):
    """The module as transformers leaves it, and what the plan says of it."""
    part = PartFacts(
        name="embed",
        type_name="Embedding",
        kind="embedding",
        style=style,
        parameters=(("weight", (VOCAB, HIDDEN)),),
        is_container=False,
        has_buffers=False,
    )
    dim = style_of(part, mesh.size()).weight_shard_dim
    if dim is not None:
        start, stop = shard_range((VOCAB, HIDDEN)[dim], mesh.get_local_rank(), mesh.size())
        local = module.weight.detach().narrow(dim, start, stop - start).clone()
        placed = DTensor.from_local(
            local,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size((VOCAB, HIDDEN)),
            stride=(HIDDEN, 1),
        )
        module.weight = nn.Parameter(placed, requires_grad=False)
    return part


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _compare(y, wanted, parameter, full_grad, dim, sync):
    sync.watch_outputs(nn.Identity(), (), y)
    assert_is_shard(shard=y.detach(), full=wanted.detach(), dim=None, what="y")
    assert_same_on_all_ranks(tensor=y, what="y")
    dy = _full(*y.shape, seed=5)
    wanted.backward(dy)
    y.backward(dy)
    assert_is_shard(shard=parameter().grad, full=full_grad(), dim=dim, what="gradient")


def _tokens_equal_peft(style, padding, cls):
    mesh = _mesh()
    shared, weight = SharedInput(mesh.get_group()), _full(VOCAB, HIDDEN)
    truth = TrainableTokensWrapper(_module(cls, weight, padding_idx=padding), "default", TRAINED)
    module = _module(cls, weight, padding_idx=padding)
    part = _cut(module, style, mesh)
    plan = plan_token_rows(part, tuple(TRAINED), mesh.size())
    layer = TploraTokens(module, "default", TRAINED, plan=plan, mesh=mesh, shared_input=shared)
    layer.update_layer("default", token_indices=TRAINED)
    original = layer.trainable_tokens_original["default"]
    assert torch.equal(original, weight[TRAINED])
    factor = layer.make_factors("default", "embed", plan)["rows"]
    sync = GradientSync(mesh.get_group(), shared)
    sync.add(factor)
    rows = _full(len(TRAINED), HIDDEN, seed=9)
    factor.parameter.data.copy_(factor.piece_of(rows))
    delta = truth.token_adapter.trainable_tokens_delta["default"]
    delta.data.copy_(rows)
    _compare(
        layer(_tokens()),
        truth(_tokens()),
        lambda: factor.parameter,
        lambda: delta.grad,
        factor.plan.shard_dim,
        sync,
    )
    bare = layer.base_layer.weight
    before = bare.full_tensor() if isinstance(bare, DTensor) else bare.clone()
    layer.merge(safe_merge=True)
    merged = layer.base_layer.weight
    merged = merged.full_tensor() if isinstance(merged, DTensor) else merged
    truth.token_adapter.merge()
    assert torch.equal(merged, truth.token_adapter.base_layer.weight)
    layer.unmerge()
    after = layer.base_layer.weight
    assert torch.equal(after.full_tensor() if isinstance(after, DTensor) else after, before)


@pytest.mark.parametrize("style", STYLES)
def test_trained_tokens_equal_pefts(world, style):
    world.run(_tokens_equal_peft, style, None, nn.Embedding)
    world.run(_tokens_equal_peft, style, 5, Scaled)


def _module_equals_torch(style, padding, cls):
    mesh = _mesh()
    shared, weight = SharedInput(mesh.get_group()), _full(VOCAB, HIDDEN)
    truth = ModulesToSaveWrapper(_module(cls, weight, padding_idx=padding), "default")
    truth.set_adapter("default")
    module = _module(cls, weight, padding_idx=padding)
    part = _cut(module, style, mesh)
    module.weight.requires_grad_(requires_grad=True)
    factor_plan = place_parameter((VOCAB, HIDDEN), "weight", style_of(part, mesh.size()))
    factor = Factor("weight", (module, "weight"), factor_plan, mesh, is_cut=True)
    plan = plan_part(part, "module", [("weight", factor_plan)], mesh.size())
    LocalModule(module, plan, {"weight": factor}, mesh, shared)
    sync = GradientSync(mesh.get_group(), shared)
    sync.add(factor)
    _compare(
        module(_tokens()),
        truth(_tokens()),
        lambda: factor.parameter,
        lambda: truth.modules_to_save["default"].weight.grad,
        factor.plan.shard_dim,
        sync,
    )


@pytest.mark.parametrize("style", STYLES)
def test_an_embedding_trained_whole_equals_torchs(world, style):
    world.run(_module_equals_torch, style, None, nn.Embedding)
    world.run(_module_equals_torch, style, 5, Scaled)
