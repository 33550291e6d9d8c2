"""KaSA: the smallest singular values of W are dropped, and those of the update are trained.

    y = x W'^T + s ((x' A^T) * d) B^T,   W' = W without its R smallest singular components

# I in_features   O out_features   R LoRA rank r   P tp_size

Source: Wang et al. 2024 (arXiv 2412.06071); PEFT's ``kasa_config`` (peft 0.21).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.variants import KasaLinearVariant

from tplora.adapter.factor import factors_of
from tplora.adapter.initial import whole_weight
from tplora.adapter.variants.local import LocalVariant
from tplora.collectives.operators import reduce_partial

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tplora.adapter.factor import Factor

__all__ = ["SingularValues"]


class SingularValues(LocalVariant):
    """KaSA on a linear, in whatever parallel state.

    Where W is cut, each rank sees a part of what reads or feeds d, so d's gradient is partial.

    Shapes, per rank: d ``[R]`` replicated; A and B as of plain LoRA.

    Communication: none in forward and backward. Once per layer, as ``whole_weight`` says. PEFT
    makes W' again from W when it loads the saved adapter.
    """

    def init(self, module: Any, adapter_name: str, **kwargs: Any) -> None:
        """PEFT's, on all of W; d is drawn from the model's seed."""
        with whole_weight(module):
            KasaLinearVariant.init(module, adapter_name, **kwargs)

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """``result + s (dropped A^T * d) B^T``."""
        scaling: float = module.scaling[name]
        down = F.linear(dropped, tensors["A"]) * tensors["diagonal"]
        return result + F.linear(down, tensors["B"]) * scaling

    def regularization(self, module: Any, name: str, beta: float, gamma: float) -> torch.Tensor:
        """``beta |d|^2 + gamma (|B^T B - I| + |A A^T - I|)``, equal on all ranks; in float32.

        What every rank computes whole has its gradient divided by their number where gradients are
        summed over ranks.

        Communication: forward, one all-reduce of ``[R, R]`` for a factor that is cut; backward,
        none.
        """
        factors = factors_of(module.factors, name)
        d = _whole_on_every_rank(factors["diagonal"]).float()
        grams = [_gram(factors["A"], dim=0), _gram(factors["B"], dim=1)]
        away = [torch.linalg.norm(gram - torch.eye(len(d), device=d.device)) for gram in grams]
        loss: torch.Tensor = beta * (d**2).sum() + gamma * (away[0] + away[1])
        return loss

    def merged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``W' + s B diag(d) A``."""
        return weight + self._delta(module, name)

    def unmerged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """W' again."""
        return weight - self._delta(module, name)

    def _delta(self, module: Any, name: str) -> torch.Tensor:
        factors = factors_of(module.factors, name)
        a, b, d = (factors[what].local().detach() for what in ("A", "B", "diagonal"))
        scaling: float = module.scaling[name]
        return (b * d) @ a * scaling


def _gram(factor: Factor, *, dim: int) -> torch.Tensor:
    """Products of a factor's vectors, which it counts along ``dim``, with each other."""
    vectors = _whole_on_every_rank(factor).float()
    vectors = vectors if dim == 0 else vectors.T
    gram = vectors @ vectors.T
    if factor.mesh is None or factor.plan.shard_dim is None:
        return gram
    return reduce_partial(gram, factor.mesh.get_group())


def _whole_on_every_rank(factor: Factor) -> torch.Tensor:
    """The factor's leaf, for what all ranks compute alike: their gradients sum up to one."""
    own = factor.local().clone()
    if factor.mesh is not None and factor.is_partial and own.requires_grad:
        num_ranks = factor.mesh.size()
        own.register_hook(lambda grad: grad / num_ranks)  # type: ignore[no-untyped-call]
    return own
