"""Forward of a frozen embedding plus its adapter on local shards.

# T tokens   V vocabulary   H hidden size   R LoRA rank r   P tp_size
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import nn

from tplora.adapter.factor import Factor, Factors, delta_like, factors_of
from tplora.adapter.initial import FromWholeWeight
from tplora.adapter.merging import MergesLocally
from tplora.adapter.variants import EMBEDDING_VARIANTS, LocalVariant
from tplora.collectives.operators import gather_last_dim, reduce_partial
from tplora.plan.style import shard_range
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.plan.layer import LayerPlan

__all__ = ["TploraEmbedding"]


class TploraEmbedding(FromWholeWeight, MergesLocally, lora.Embedding):  # type: ignore[misc]
    """A frozen embedding, cut on the vocabulary, on the hidden size or whole, with its adapter.

        y = sum over ranks of  [t in shard] * ( W_k[t] + scaling * A_k[:, t]^T B^T )    vocabulary
        y = all ranks' pieces  ( W_k[t] + scaling * A[:, t]^T B_k^T )                   hidden size

    On the vocabulary, a token outside this rank's part contributes zero, and the sum over ranks is
    the lookup. The replicated factor's gradient is partial. A scaled embedding multiplies W and
    delta by the same ``embed_scale``. PEFT's embedding has no dropout on its input.

    Shapes, per rank:
        t      [T]                      replicated  token ids
        W      [V/P, H] or [V, H/P]     sharded     frozen
        A      [R, V/P] or [R, V]       sharded or replicated
        B      [H, R]   or [H/P, R]     replicated or sharded
        y      [T, H]                   replicated

    Communication: forward, one all-reduce or all-gather of [T, H]; backward, none. None when W is
        whole.

    Source: Shoeybi et al. 2019, section 3 (the vocabulary-parallel embedding).
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        *,
        plan: LayerPlan,
        mesh: DeviceMesh | None,
        **kwargs: Any,
    ) -> None:
        self.plan, self.mesh = plan, mesh  # before PEFT, which asks for the sizes
        super().__init__(base_layer, adapter_name, **kwargs)
        self.factors: dict[str, Factors] = {}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        vocab_size, hidden_size = self.plan.weight.shape
        return vocab_size, hidden_size

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LocalVariant] | None]:
        """What PEFT builds for the fields of a config that change what an adapter computes."""
        return EMBEDDING_VARIANTS

    def make_factors(self, adapter_name: str, prefix: str, plan: LayerPlan) -> Factors:
        """Cut A and B, which PEFT has just drawn in full, to this rank's pieces."""
        places = [
            ("A", "lora_embedding_A", self.lora_embedding_A, adapter_name, plan.a),
            ("B", "lora_embedding_B", self.lora_embedding_B, adapter_name, plan.b),
        ]
        for extra, factor_plan in plan.extras:
            owner, key = self.lora_magnitude_vector[adapter_name], "lora_magnitude_vector"
            places.append((extra, key, owner, "weight", factor_plan))
        self.factors[adapter_name] = {
            what: Factor(
                f"{prefix}.{key}.{adapter_name}" + ("" if leaf == adapter_name else f".{leaf}"),
                (owner, leaf),
                factor_plan,
                self.mesh,
            )
            for what, key, owner, leaf, factor_plan in places
        }
        return self.factors[adapter_name]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Look tokens up in this rank's part and put the parts together."""
        dim = self.plan.weight.shard_dim
        scale = self._get_embed_scale()
        if dim is None:
            return self._add_delta(self.base_layer(x, *args, **kwargs), x, scale=scale)
        assert self.mesh is not None
        y = self._vocabulary_cut(x) if dim == 0 else self._hidden_cut(x)
        return y if scale is None else y * scale.to(y.dtype)

    def _vocabulary_cut(self, x: torch.Tensor) -> torch.Tensor:
        assert self.mesh is not None
        start, stop = shard_range(
            self.plan.weight.shape[0], self.mesh.get_local_rank(), self.mesh.size()
        )
        is_ours = (x >= start) & (x < stop)
        own = (x - start).clamp(0, max(stop - start - 1, 0))
        rows = F.embedding(own, local_shard(self.get_base_layer().weight))
        masked = self._add_delta(rows, own, start) * is_ours.unsqueeze(-1).to(rows.dtype)
        return reduce_partial(masked, self.mesh.get_group())

    def _hidden_cut(self, x: torch.Tensor) -> torch.Tensor:
        assert self.mesh is not None
        rows = self._add_delta(F.embedding(x, local_shard(self.get_base_layer().weight)), x)
        return gather_last_dim(rows, self.plan.weight.shape[1], self.mesh.get_group())

    def _add_delta(
        self,
        result: torch.Tensor,
        tokens: torch.Tensor,
        start: int = 0,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``result + scale * scaling * A[:, tokens]^T B^T``; ``tokens`` count from ``start``."""
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        for name in self.active_adapters:
            if name not in self.lora_embedding_A:
                continue
            factors = factors_of(self.factors, name)
            tensors = {what: factor.local() for what, factor in factors.items()}
            a = tensors["A"]
            rows = F.embedding(tokens, a.T, padding_idx=self._own_padding(a.shape[1], start))
            rows = rows if scale is None else rows * scale.to(rows.dtype)
            result = self._apply_adapter(name, result, rows, tensors)
        return result.to(dtype)

    def _apply_adapter(
        self, name: str, result: torch.Tensor, rows: torch.Tensor, tensors: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """``result`` with one adapter's part, from A's rows of the tokens."""
        variant: LocalVariant | None = self.lora_variant.get(name)
        if variant is None:
            scaling: float = self.scaling[name]
            return result + F.linear(rows, tensors["B"]) * scaling
        tensors |= variant.constants(self, name, tensors)
        return variant.apply(self, name, result, rows, tensors)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """``scaling * (B A)^T``, placed as W is; PEFT merges it. No communication."""
        factors = factors_of(self.factors, adapter)
        a, b = factors["A"].local(), factors["B"].local()
        return delta_like(self.get_base_layer().weight, (b @ a).mT * self.scaling[adapter])

    def _own_padding(self, num_rows: int, start: int) -> int | None:
        """The padding token's place in this shard; its column of A gets no gradient."""
        padding: int | None = self.get_base_layer().padding_idx
        if padding is None or not start <= padding < start + num_rows:
            return None
        return padding - start
