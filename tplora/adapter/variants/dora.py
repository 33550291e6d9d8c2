"""DoRA: the direction of each output feature's weights is adapted, and its magnitude is trained.

    W' = m (W + s B A) / n,   n = the norm of each row of W + s B A, held constant in backward

# I in_features   O out_features   R LoRA rank r   P tp_size

Source: Liu et al. 2024, equation 5 and section 4.3; PEFT's ``use_dora``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn
from torch.distributed.tensor import DTensor

from tplora.adapter.factor import factors_of
from tplora.adapter.variants.local import LocalVariant
from tplora.base.quantized_product import dequantize, multiply
from tplora.collectives.raw import all_reduce
from tplora.upstream import local_shard, placement_of
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tplora.plan.style import TensorPlan

__all__ = ["EmbeddingDora", "LinearDora", "squared_row_norms"]


def squared_row_norms(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """``sum over in of (W + s B A)^2`` for each output feature, without the product B A.

        |W|^2 + 2 s (W A^T) . B + s^2 (B (A A^T)) . B,   each summed over its row

    Shapes: W ``[O, I]``, A ``[R, I]``, B ``[O, R]``, the result ``[O]``; of a piece of I it is that
    piece's part of the sum.
    """
    cross = ((weight @ a.T) * b).sum(dim=1)
    square = ((b @ (a @ a.T)) * b).sum(dim=1)
    return weight.square().sum(dim=1) + 2 * scaling * cross + scaling**2 * square


class LinearDora(LocalVariant):
    """DoRA on a linear, in whatever parallel state.

        y = x W^T + (m / n - 1) x' W^T + (m / n) s (x' A^T) B^T,   x' = dropout(x)

    The norm is over all of I: where W is cut on it, the pieces' squares are summed. m and n are
    placed as the output features are, so each rank scales its own part of the product; where that
    part is of a sum, m's gradient is partial.

    Shapes, per rank: m and n ``[O/P]`` sharded where W is cut on out, else ``[O]`` replicated.

    Communication: forward, one all-reduce of [O] where W is cut on in; backward, none.
    """

    def init(self, module: Any, adapter_name: str, **_: Any) -> None:
        """The magnitudes of W + s B A, in full; A and B are not cut yet."""
        layer = DoraLinearLayer(fan_in_fan_out=False)
        norm = self._initial_norm(module, adapter_name)
        layer.weight = nn.Parameter(norm)
        module.lora_magnitude_vector[adapter_name] = layer

    def constants(
        self, module: Any, name: str, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The norms of this rank's output features."""
        a, b = tensors["A"], tensors["B"]
        with torch.no_grad():
            weight = self._oriented(_values(module.get_base_layer(), a.dtype))
            return {"norm": self._norm(module, weight, a, b, module.scaling[name])}

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        *,
        bias: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Without dropout the base's product is in ``result`` already, as in PEFT."""
        scale = tensors["magnitude"] / tensors["norm"]
        if isinstance(module.lora_dropout[name], nn.Identity) or not module.training:
            base = result if bias is None else result - bias
        else:
            base = _product(module.get_base_layer(), dropped)
        scaling: float = module.scaling[name]
        delta = F.linear(F.linear(dropped, tensors["A"]), tensors["B"]) * scaling
        return result + (scale - 1) * base + scale * delta

    def _initial_norm(self, module: Any, name: str) -> torch.Tensor:
        base = module.get_base_layer()
        a, b = (tensor.detach() for tensor in self._full_factors(module, name))
        weight = self._oriented(_values(base, a.dtype).detach())
        scaling, plan = module.scaling[name], self._out_in(module.plan.weight)
        is_piece = module.mesh is not None and plan.shard_dim is not None
        if not is_piece or not (isinstance(base.weight, DTensor) or is_quantized_linear(base)):
            return squared_row_norms(weight, a, b, scaling).sqrt()
        ranges = plan.shard_ranges(module.mesh.get_local_rank(), module.mesh.size())
        if plan.shard_dim == 0:
            b = torch.cat([b[start:stop] for start, stop in ranges])
        else:
            a = torch.cat([a[:, start:stop] for start, stop in ranges], dim=1)
        norm = self._norm(module, weight, a, b, scaling)
        placed = DTensor.from_local(
            norm,
            module.mesh,
            [placement_of(0 if plan.shard_dim == 0 else None, plan.split_factor)],
            run_check=False,
            shape=torch.Size((plan.shape[0],)),
            stride=(1,),
        )
        full: torch.Tensor = placed.full_tensor()
        return full

    def _norm(
        self, module: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """One all-reduce of [O] where W is cut on its input."""
        squares = squared_row_norms(weight.to(a.dtype), a, b, scaling)
        if self._out_in(module.plan.weight).shard_dim == 1:
            squares = all_reduce(squares, module.mesh.get_group())
        return squares.sqrt()

    def _full_factors(self, module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B as PEFT has drawn them."""
        return module.lora_A[name].weight, module.lora_B[name].weight

    def _oriented(self, weight: torch.Tensor) -> torch.Tensor:
        """W as ``[out, in]``."""
        return weight

    def _out_in(self, plan: TensorPlan) -> TensorPlan:
        return plan

    def merged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``m / n (W + delta)``; n is of W before anything was merged into it."""
        factors = factors_of(module.factors, name)
        a, b, magnitude = (factors[what].local() for what in ("A", "B", "magnitude"))
        with module._unmerged_base_weight() as unmerged, torch.no_grad():
            oriented = self._oriented(local_shard(unmerged))
            norm = self._norm(module, oriented, a, b, module.scaling[name])
        scale = (magnitude.detach() / norm)[:, None]
        module._cache_store(f"{name}-scale", scale)
        weight = local_shard(module.get_base_layer().weight.data)
        total = weight + local_shard(module.get_delta_weight(name))
        return self._oriented(scale * self._oriented(total))

    def unmerged(self, module: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
        """``W' n / m - delta``."""
        scale = module._cache_pop(f"{name}-scale")
        divided = self._oriented(self._oriented(weight) / scale)
        return divided - local_shard(module.get_delta_weight(name))


def _values(base: Any, dtype: torch.dtype) -> torch.Tensor:
    """This rank's piece of W to be read, unpacked where it is quantised. No communication."""
    if is_quantized_linear(base):
        return dequantize(base, dtype)
    return local_shard(base.weight).to(dtype)


def _product(base: Any, x: torch.Tensor) -> torch.Tensor:
    """``x W^T`` with this rank's piece of W, in x's dtype. No communication."""
    if is_quantized_linear(base):
        return multiply(base, x, None, computes_in_own=True)
    return F.linear(x, local_shard(base.weight).to(x.dtype))


class EmbeddingDora(LinearDora):
    """DoRA on an embedding: the norms are over the vocabulary, one for each hidden feature.

        y = (m / n) (W[t] + s A[:, t]^T B^T)

    Shapes, per rank: m and n ``[H]`` replicated where W ``[V, H]`` is cut on V, ``[H/P]`` where on
    H.

    Communication: forward, one all-reduce of [H] where W is cut on V; backward, none.
    """

    def apply(
        self,
        module: Any,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """``dropped`` is A's rows of the tokens."""
        scaling: float = module.scaling[name]
        delta = F.linear(dropped, tensors["B"]) * scaling
        return tensors["magnitude"] / tensors["norm"] * (result + delta)

    def _full_factors(self, module: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return module.lora_embedding_A[name], module.lora_embedding_B[name]

    def _oriented(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.T

    def _out_in(self, plan: TensorPlan) -> TensorPlan:
        return plan.transposed()
