"""Some tokens of an embedding, and of a head, trained as rows of their own beside a frozen W.

# T tokens   N trained tokens   V vocabulary   H hidden size   P tp_size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import nn

from tplora.adapter.factor import Factor, Factors, factors_of, placed_like
from tplora.collectives.operators import gather_last_dim, reduce_partial
from tplora.collectives.raw import all_gather, all_reduce
from tplora.plan.style import shard_range
from tplora.upstream import local_shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.trained import TrainedPlan

__all__ = ["TploraTokens"]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the trained tokens of an adapter are."""

    tokens: tuple[int, ...]
    ordered: torch.Tensor
    """The tokens, sorted."""
    order: torch.Tensor
    """Which row of D each of the sorted tokens has."""
    columns: torch.Tensor
    """Of the tokens whose row of W is here: where in this rank's W it is."""
    rows: torch.Tensor
    """Of the same tokens: their rows of D."""

    @classmethod
    def of(
        cls, tokens: tuple[int, ...], vocab_range: tuple[int, int], device: torch.device
    ) -> _Places:
        """From the tokens and the part of the vocabulary that this rank holds."""
        found, (start, stop) = torch.tensor(tokens), vocab_range
        ordered, order = found.sort()
        rows = ((found >= start) & (found < stop)).nonzero().squeeze(1)
        on_device = (t.to(device) for t in (ordered, order, found[rows] - start, rows))
        return cls(tokens, *on_device)


class TploraTokens(TrainableTokensLayer):  # type: ignore[misc]
    """PEFT's layer of trained tokens; W is not copied in a forward, as it is there.

        y[t] = D[i] where t is trained token i, else W[t]      an embedding
        z[v] = x D[i]^T where v is trained token i, else x W[v]^T       a head

    Where W is cut on the vocabulary each rank uses the rows of D whose tokens it holds, in the
    embedding as in a head that is tied to it: D is whole, and its gradient a part of a sum. A head
    computes the logits of its own trained tokens anew and puts them in the place of the old ones.

    Shapes, per rank:
        t   [T]                      replicated  token ids
        W   [V/P, H] or [V, H/P]     sharded     frozen
        D   [N, H]   or [N, H/P]     replicated or sharded
        y   [T, H]                   replicated
        z   [T, V/P]                 sharded; [T, V] when the style gathers its output

    Communication: the frozen layer's own. When it is built, one sum of [N, H] over ranks.

    Args:
        base_layer: The embedding or the head.
        adapter_name: The first adapter.
        token_indices: PEFT's; the tokens come with ``update_layer``.
        tied_adapter: The embedding's layer, whose rows a tied head uses.
        plan: How W is cut.
        mesh: The tp mesh, or None in one process.
        shared_input: ``replicate_input`` for layers that read one tensor.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        token_indices: Sequence[int],
        tied_adapter: TploraTokens | None = None,
        *,
        plan: TrainedPlan,
        mesh: DeviceMesh | None,
        shared_input: SharedInput,
    ) -> None:
        super().__init__(base_layer, adapter_name, token_indices, tied_adapter)
        self.plan, self.mesh, self.shared_input = plan, mesh, shared_input
        self.factors: dict[str, Factors] = {} if tied_adapter is None else tied_adapter.factors
        self._places: dict[str, _Places] = {}

    @property
    def shard_dim(self) -> int | None:
        """The dim of W that is cut."""
        assert self.plan.weight is not None
        return self.plan.weight.shard_dim

    @property
    def vocab_range(self) -> tuple[int, int]:
        """The tokens whose rows of W this rank holds."""
        assert self.plan.weight is not None
        size: int = self.plan.weight.shape[0]
        if self.mesh is None or self.shard_dim != 0:
            return 0, size
        return shard_range(size, self.mesh.get_local_rank(), self.mesh.size())

    def update_layer(
        self,
        adapter_name: str,
        config: Any = None,
        tied_adapter: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """PEFT's: the rows begin as W's. In full on every rank; they are cut afterwards."""
        if tied_adapter is not None:
            return
        tokens = list(kwargs["token_indices"])
        rows = self._full_rows(tokens)
        self.token_indices[adapter_name] = tokens
        self.trainable_tokens_delta[adapter_name] = nn.Parameter(rows.clone())
        self.trainable_tokens_original[adapter_name] = rows
        self._move_adapter_to_device_of_base_layer(adapter_name)

    def _full_rows(self, tokens: list[int]) -> torch.Tensor:
        weight = local_shard(self.get_base_layer().weight).detach()
        if self.mesh is None or self.shard_dim is None:
            return weight[tokens]
        assert self.plan.weight is not None
        if self.shard_dim == 1:
            size = self.plan.weight.shape[1]
            return all_gather(weight[tokens], size, self.mesh.get_group(), dim=1)
        own = _Places.of(tuple(tokens), self.vocab_range, weight.device)
        rows = weight.new_zeros((len(tokens), weight.shape[1]))
        rows[own.rows] = weight[own.columns]
        return all_reduce(rows, self.mesh.get_group())

    def make_factors(self, adapter_name: str, prefix: str, plan: TrainedPlan) -> Factors:
        """Cut the rows, which are whole until now, to this rank's pieces; none for a tied layer."""
        if not plan.factors:
            return {}
        ((what, rows),) = plan.factors
        name = f"{prefix}.token_adapter.trainable_tokens_delta.{adapter_name}"
        owner = self.trainable_tokens_delta, adapter_name
        self.factors[adapter_name] = {what: Factor(name, owner, rows, self.mesh)}
        return self.factors[adapter_name]

    def places(self, name: str) -> _Places:
        """Where an adapter's tokens are; found once, since to ask a device waits for it."""
        tokens = tuple(self.token_indices[name])
        device = self.get_base_layer().weight.device
        known = self._places.get(name)
        if known is None or known.tokens != tokens or known.columns.device != device:
            known = self._places[name] = _Places.of(tokens, self.vocab_range, device)
        return known

    def _rows(self, name: str) -> torch.Tensor:
        dtype = self.get_base_layer().weight.dtype
        return factors_of(self.factors, name)["rows"].local().to(dtype)

    def own_columns(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Which logits of this rank a head computes anew, and with which rows."""
        own = self.places(name)
        return own.columns, self._rows(name).index_select(0, own.rows)

    def applied_adapters(self) -> list[str]:
        """The adapters that take part in a forward."""
        if self.disable_adapters or self.merged:
            return []
        return [name for name in self.active_adapters if name in self.token_indices]

    def forward_adapters(
        self, x: torch.Tensor, active_adapters: Sequence[str], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The frozen layer's own forward, or that with the adapters' rows."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged or not active_adapters:
            y: torch.Tensor = self.base_layer(x, *args, **kwargs)
            return y
        self._check_overlapping_tokens(list(active_adapters))
        if isinstance(self.base_layer, nn.Embedding):
            return self._embed(x, active_adapters)
        return self._project(x, active_adapters)

    def _project(self, x: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        assert self.plan.weight is not None
        x = self.shared_input(x) if self.shard_dim == 0 else x
        z = F.linear(x, local_shard(self.base_layer.weight))
        for name in names:
            columns, rows = self.own_columns(name)
            z = z.index_copy(-1, columns, F.linear(x, rows))
        if self.plan.gathers_output and self.mesh is not None:
            return gather_last_dim(z, self.plan.weight.shape[0], self.mesh.get_group())
        return z

    def _embed(self, tokens: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        assert self.plan.weight is not None
        start, stop = self.vocab_range
        own = (tokens - start).clamp(0, max(stop - start - 1, 0))
        y = F.embedding(own, local_shard(self.base_layer.weight))
        for name in names:
            y = self._with_rows(y, tokens, name)
        if self.mesh is not None and self.shard_dim == 0:
            is_ours = (tokens >= start) & (tokens < stop)
            y = reduce_partial(y * is_ours.unsqueeze(-1).to(y.dtype), self.mesh.get_group())
        elif self.mesh is not None and self.shard_dim == 1:
            y = gather_last_dim(y, self.plan.weight.shape[1], self.mesh.get_group())
        scale = self._get_embed_scale()
        return y if scale is None else y * scale.to(y.dtype)

    def _with_rows(self, y: torch.Tensor, tokens: torch.Tensor, name: str) -> torch.Tensor:
        """``y`` with the adapter's rows at its tokens; the padding token's gets no gradient."""
        own, padding = self.places(name), self.base_layer.padding_idx
        place = torch.searchsorted(own.ordered, tokens).clamp(max=len(own.tokens) - 1)
        is_trained = own.ordered[place] == tokens
        row = own.tokens.index(padding) if padding in own.tokens else None
        new = F.embedding(own.order[place], self._rows(name), padding_idx=row)
        return torch.where(is_trained.unsqueeze(-1), new, y)

    def get_merged_weights(self, active_adapters: Sequence[str]) -> torch.Tensor:
        """W with the adapters' rows in it, placed as W is, for who reads ``.weight``.

        A copy of this rank's piece; no forward of ours asks for it. Gradients reach the rows. No
        communication.
        """
        weight = self.base_layer.weight
        merged = local_shard(weight)
        for name in active_adapters:
            columns, rows = self.own_columns(name)
            merged = merged.index_copy(0, columns, rows)
        return placed_like(weight, merged)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """PEFT's: the adapters' rows take the place of W's."""
        names = self.active_adapters if adapter_names is None else adapter_names
        names = [name for name in names if name not in self.merged_adapters]
        names = [name for name in names if name in self.token_indices]
        self._check_overlapping_tokens(names)
        for name in names:
            columns, rows = self.own_columns(name)
            if safe_merge and not bool(torch.isfinite(rows).all()):
                raise ValueError(f"NaN or infinity in the trained tokens of {name}")
            self._write(columns, rows)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """PEFT's: the rows that W had."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            own = self.places(name)
            original = self.trainable_tokens_original[name]
            if self.shard_dim == 1 and self.mesh is not None:
                start, stop = shard_range(
                    original.shape[1], self.mesh.get_local_rank(), self.mesh.size()
                )
                original = original[:, start:stop]
            self._write(own.columns, original[own.rows])

    def _write(self, columns: torch.Tensor, rows: torch.Tensor) -> None:
        """Into this rank's piece of W itself, which other modules may share."""
        with torch.no_grad():
            weight = local_shard(self.base_layer.weight)
            weight.index_copy_(0, columns, rows.to(weight.dtype))
