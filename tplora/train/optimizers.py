"""PEFT's own optimizers for LoRA, over factors that are cut.

LoRA+ gives B a higher learning rate than A: parameter groups, nothing else (Hayou et al. 2024).
LoRA-FA freezes A and corrects B's gradient by the inverse of A A^T (Zhang et al. 2023).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from peft.optimizers import create_lorafa_optimizer as create_plain_lorafa
from peft.optimizers import create_loraplus_optimizer as create_plain_loraplus
from peft.optimizers.lorafa import LoraFAOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainingArguments

    from tplora.adapter.model import TploraModel

__all__ = ["create_lorafa_optimizer", "create_loraplus_optimizer"]


def create_loraplus_optimizer(
    model: TploraModel, args: TrainingArguments, *, lr_ratio: float, lr_embedding: float | None
) -> torch.optim.Optimizer:
    """The optimizer that ``args`` names, in LoRA+'s groups.

        learning rate = lr for A, lr * lr_ratio for B, lr_embedding for factors of embeddings

    Args:
        model: Its trainable factors are optimized.
        args: Name the optimizer, its learning rate and its weight decay.
        lr_ratio: B's learning rate over A's.
        lr_embedding: PEFT's 1e-6 when left out.
    """
    cls, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if lr_embedding is not None:
        settings["loraplus_lr_embedding"] = lr_embedding
    optimizer: torch.optim.Optimizer = create_plain_loraplus(
        model=model,
        optimizer_cls=cls,
        loraplus_lr_ratio=lr_ratio,
        loraplus_weight_decay=args.weight_decay,
        **settings,
    )
    return optimizer


def create_lorafa_optimizer(model: TploraModel, **settings: Any) -> torch.optim.Optimizer:
    """PEFT's ``create_lorafa_optimizer``; under tensor parallelism each rank steps its rows of B.

    Args:
        model: A's are frozen here.
        settings: PEFT's: ``r``, ``lora_alpha``, ``lr``, ``weight_decay``.
    """
    plain: torch.optim.Optimizer = create_plain_lorafa(model=model, **settings)
    return plain if model.mesh is None else _LocalLoraFA(plain.param_groups)


class _LocalLoraFA(LoraFAOptimizer):  # type: ignore[misc]
    """LoRA-FA's step on this rank's piece of B and the whole of A.

    Every row of B steps by itself, so a piece of B steps as its part of B would. A is frozen: it is
    gathered once and kept, r x I numbers for each layer.

    Communication: first step, one all-gather of each A that is cut; then none.
    """

    def __init__(self, param_groups: Any) -> None:
        super().__init__(param_groups)
        self._whole: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """PEFT's step, on plain tensors."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with contextlib.ExitStack() as stack:
            for group in self.param_groups:
                stack.enter_context(self._plain_tensors(group))
            super().step()
        return loss

    @contextlib.contextmanager
    def _plain_tensors(self, group: Any) -> Iterator[None]:
        held = group["params"]
        group["params"] = [
            self._plain(name, p) for name, p in zip(group["names"], held, strict=True)
        ]
        try:
            yield
        finally:
            group["params"] = held

    def _plain(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return parameter
        if "lora_A" in name or "lora_embedding_A" in name:
            if name not in self._whole:
                self._whole[name] = parameter.full_tensor()
            return self._whole[name]
        local = local_shard(parameter).detach()
        if parameter.grad is not None:
            local.grad = local_shard(parameter.grad)
        return local
