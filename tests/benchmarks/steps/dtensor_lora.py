"""LoRA under plain torch: ``parallelize_module`` and DTensor parameters, as torchtitan has it.

W, A and B are DTensors and the layer's forward computes on DTensors: colwise W and B ``Shard(0)``,
A ``Replicate``; rowwise W and A ``Shard(1)``, B ``Replicate``. Gradients of replicated factors come
out partial, and are reduced one by one before the optimizer. Needs torch alone.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

ROWWISE = ("o_proj", "down_proj")


class LoraLinear(nn.Module):
    """``x W^T + s (x A^T) B^T``."""

    def __init__(self, base: nn.Linear, r: int, scaling: float) -> None:
        super().__init__()
        self.weight = base.weight
        self.lora_A = nn.Parameter(torch.randn(r, base.in_features) * base.in_features**-0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = scaling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + self.scaling * F.linear(
            F.linear(x, self.lora_A), self.lora_B
        )


class LoraParallel(ParallelStyle):
    """Where W, A and B are cut, and what goes in and comes out, for ``parallelize_module``."""

    def __init__(self, *, is_rowwise: bool) -> None:
        self.is_rowwise = is_rowwise

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut, whole = Shard(1 if self.is_rowwise else 0), Replicate()
        places = {
            "weight": cut,
            "lora_A": cut if self.is_rowwise else whole,
            "lora_B": whole if self.is_rowwise else cut,
        }
        for name, place in places.items():
            full = getattr(module, name)
            shard = distribute_tensor(full.data, device_mesh, [place], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard, requires_grad=full.requires_grad))
        given = Shard(-1) if self.is_rowwise else Replicate()
        left = Replicate() if self.is_rowwise else Shard(-1)
        module.register_forward_pre_hook(
            lambda _, args: (DTensor.from_local(args[0], device_mesh, [given], run_check=False),)
        )
        module.register_forward_hook(
            lambda _, args, y: y.redistribute(placements=[left]).to_local()
        )
        return module


def parallelize(model: nn.Module, mesh: DeviceMesh, r: int) -> nn.Module:
    """Adapt and cut each linear of a Llama, then its embedding and head."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in list(model.named_modules()):
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Linear) and leaf != "lm_head":
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, leaf, LoraLinear(module, r, scaling=2.0))
            plan[name] = LoraParallel(is_rowwise=leaf in ROWWISE)
    plan["model.embed_tokens"] = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Replicate()
    )
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), False)
    return parallelize_module(model, mesh, plan)


def reduce_partial_gradients(parameters: list[nn.Parameter]) -> None:
    """What DTensor leaves to the caller: gradients in the placement of their parameters."""
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
