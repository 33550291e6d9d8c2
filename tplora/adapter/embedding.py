"""Forward of a frozen embedding plus its adapter on local shards.

# T tokens   V vocabulary   H hidden size   R LoRA rank r   P tp_size
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import nn

from tplora.adapter.factor import Factor, delta_like, factors_of
from tplora.collectives import gather_last_dim, reduce_partial
from tplora.plan.style import shard_range
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.plan.layer import LayerPlan

__all__ = ["TploraEmbedding"]


class TploraEmbedding(lora.Embedding):  # type: ignore[misc]
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
        self.plan = plan  # before PEFT, which asks for the sizes
        super().__init__(base_layer, adapter_name, **kwargs)
        self.mesh = mesh
        self.factors: dict[str, tuple[Factor, Factor]] = {}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        vocab_size, hidden_size = self.plan.weight.shape
        return vocab_size, hidden_size

    def make_factors(
        self, adapter_name: str, prefix: str, plan: LayerPlan
    ) -> tuple[Factor, Factor]:
        """Cut A and B, which PEFT has just drawn in full, to this rank's pieces."""
        a, b = (
            Factor(
                f"{prefix}.{key}.{adapter_name}",
                (getattr(self, key), adapter_name),
                factor_plan,
                self.mesh,
            )
            for key, factor_plan in (("lora_embedding_A", plan.a), ("lora_embedding_B", plan.b))
        )
        self.factors[adapter_name] = (a, b)
        return a, b

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
            a, b = (factor.local() for factor in factors_of(self.factors, name))
            rows = F.embedding(tokens, a.T, padding_idx=self._own_padding(a.shape[1], start))
            delta = F.linear(rows, b) * self.scaling[name]
            result = result + (delta if scale is None else delta * scale.to(delta.dtype))
        return result.to(dtype)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """``scaling * (B A)^T``, placed as W is; PEFT merges it. No communication."""
        a, b = (factor.local() for factor in factors_of(self.factors, adapter))
        return delta_like(self.get_base_layer().weight, (b @ a).mT * self.scaling[adapter])

    def _own_padding(self, num_rows: int, start: int) -> int | None:
        """The padding token's place in this shard; its column of A gets no gradient."""
        padding: int | None = self.get_base_layer().padding_idx
        if padding is None or not start <= padding < start + num_rows:
            return None
        return padding - start
