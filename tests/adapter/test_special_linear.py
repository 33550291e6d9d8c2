"""A linear whose class does more than multiply, adapted by its parameter, against plain PEFT."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from peft.tuners import lora
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.communication import count_collectives
from tests.parity import assert_is_shard
from tests.world import RankError
from tplora.adapter import parameter
from tplora.adapter.factor import shard_full
from tplora.adapter.gradients import GradientSync
from tplora.adapter.parameter import ParamWrapper
from tplora.collectives.shared_input import SharedInput
from tplora.plan.layer import plan_weight

pytestmark = pytest.mark.world

OUT, IN = 7, 6
SETTINGS = {"parameter_name": "weight", "r": 3, "lora_alpha": 2}


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2.5


def _draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _wrap(build) -> lora.ParamWrapper:
    base = Scaled(IN, OUT, dtype=torch.float64).requires_grad_(False)
    base.weight.data, base.bias.data = _draw(OUT, IN), _draw(OUT)
    wrapper = build(base, "default", config=LoraConfig(r=3), **SETTINGS)
    wrapper.lora_A["default"].weight.data = _draw(3, IN)
    wrapper.lora_B["default"].weight.data = _draw(OUT, 3)
    return wrapper


def _cut(style: str) -> tuple[ParamWrapper, GradientSync]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    shared = SharedInput(mesh.get_group())
    plan = plan_weight(
        "layer.weight", "parameter", style, (OUT, IN), (1, 0), r=3, tp_size=2, has_bias=True
    )

    def build(base, name, **settings):
        for key, full in list(base.named_parameters()):
            cut = DTensor.from_local(
                full.data.chunk(mesh.size())[mesh.get_local_rank()],
                mesh,
                [Shard(0)],
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            setattr(base, key, nn.Parameter(cut, requires_grad=False))
        return ParamWrapper(base, name, plan=plan, mesh=mesh, shared_input=shared, **settings)

    wrapper, sync = _wrap(build), GradientSync(mesh.get_group(), shared)
    for factor in wrapper.make_factors("default", "layer", plan).values():
        sync.add(factor)
    return wrapper, sync


def _special_linear_equals_plain_peft(style: str) -> dict[str, int]:
    here, _ = _cut(style)
    there = _wrap(lora.ParamWrapper)
    x, x_full = (_draw(4, IN).requires_grad_() for _ in range(2))
    y_full, outputs = there(x_full), []
    calls = count_collectives(lambda: outputs.append(here(x)))
    dim = None if here.plan.gathers_output else -1
    assert_is_shard(shard=outputs[0].detach(), full=y_full.detach(), dim=dim, what="y")
    dy = _draw(4, OUT)
    y_full.backward(dy)
    piece = dy if dim is None else dy.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    outputs[0].backward(piece)
    assert_is_shard(shard=x.grad, full=x_full.grad, dim=None, what="dx")
    for key, factor in zip("AB", here.factors["default"].values(), strict=True):
        full = getattr(there, f"lora_{key}")["default"].weight.grad
        wanted = shard_full(full, factor.plan, here.mesh)
        assert_is_shard(shard=factor.parameter.grad, full=wanted, dim=None, what=f"grad of {key}")
    return calls


@pytest.mark.parametrize(
    ("style", "calls"), [("colwise", {}), ("colwise_gather_output", {"all_gather": 1})]
)
def test_a_special_linear_equals_plain_peft(world, style, calls):
    assert world.run(_special_linear_equals_plain_peft, style)[0] == calls


def _while_only_multiplied() -> None:
    with mock.patch.object(parameter, "own_forward", lambda base: super(Scaled, base).forward):
        _special_linear_equals_plain_peft("colwise")


def test_parity_sees_a_class_whose_own_forward_is_left_out(world2):
    with pytest.raises(RankError, match="AssertionError: y"):
        world2.run(_while_only_multiplied)
