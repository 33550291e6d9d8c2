"""Any module of the base on this rank's pieces, with leaves in place of what is trained of it.

# T tokens   I in_features   O out_features   V vocabulary   H hidden size   P tp_size
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tplora.base.quantized_product import multiply
from tplora.collectives.operators import gather_last_dim, reduce_partial, split_last_dim
from tplora.plan.style import shard_range
from tplora.upstream import local_shard, own_forward, transform_output
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.adapter.factor import Factor
    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.trained import TrainedPlan

__all__ = ["LocalModule", "local_module_of", "local_tensor"]


class LocalModule:
    """A module's forward on local shards: a linear, an embedding, or any other that is whole.

        y = x W_k^T + b_k                               a linear cut on out
        y = b + sum over ranks of x_k W_k^T             a linear cut on in
        y = sum over ranks of [t in shard] W_k[t]       an embedding cut on the vocabulary
        y = all ranks' pieces W_k[t]                    an embedding cut on the hidden size
        y = the class's own forward                     all else, which every rank holds whole

    It takes the place of what a style of transformers put around the module, which runs on DTensors
    and, in a copy of the module, would still run the original.

    Shapes, per rank:
        x   [T, I] replicated, or [T, I/P] sharded where W is cut on in
        t   [T]    replicated
        y   [T, O] replicated, or [T, O/P] sharded where W is cut on out and the style does not
                   gather; [T, H] replicated for an embedding

    Communication: that of ``adapter/linear.py`` and ``adapter/embedding.py``; whole modules, none.

    Args:
        module: The module; its ``forward`` is replaced until ``remove``.
        plan: How it is cut.
        factors: What is trained of it, by the parameter's name.
        mesh: The tp mesh.
        shared_input: ``replicate_input`` for layers that read one tensor.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: TrainedPlan,
        factors: Mapping[str, Factor],
        mesh: DeviceMesh,
        shared_input: SharedInput,
    ) -> None:
        self.module, self.plan, self.factors = module, plan, dict(factors)
        self.mesh, self.shared_input = mesh, shared_input
        self.reduce: Callable[[torch.Tensor, ProcessGroup], torch.Tensor] = reduce_partial
        """How the ranks' products of a linear that is cut on in become one."""
        run = {"linear": self._linear, "embedding": self._embedding}.get(plan.kind, self._whole)
        vars(module)["forward"] = run

    def __deepcopy__(self, _memo: dict[int, Any]) -> LocalModule:
        """PEFT copies modules that it trains; a copy is given a forward of its own."""
        return self

    @property
    def group(self) -> ProcessGroup:
        """The tensor-parallel process group."""
        return self.mesh.get_group()

    def tensor(self, leaf: str) -> torch.Tensor | None:
        """This rank's piece of a parameter: the leaf that is trained, or what is frozen."""
        if leaf in self.factors:
            return self.factors[leaf].local()
        parameter = self.module._parameters.get(leaf)
        return None if parameter is None else local_shard(parameter)

    def _weight(self) -> torch.Tensor:
        weight = self.tensor("weight")
        assert weight is not None
        return weight

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        bias, cut = self.tensor("bias"), self.plan.weight
        assert cut is not None
        if cut.shard_dim == 0:
            y = self._product(self.shared_input(x), bias)
            return gather_last_dim(y, cut.shape[0], self.group) if self.plan.gathers_output else y
        if cut.shard_dim == 1:
            x = split_last_dim(x, self.group) if self.plan.splits_input else x
            y = self.reduce(self._product(x, None), self.group)
            return y if bias is None else y + bias
        y = self._product(x, bias)
        if self.plan.transforms_output:
            assert self.plan.style is not None
            y = transform_output(self.plan.style, self.module, y, self.mesh)
        return y

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """With this rank's W; a quantised one is never trained itself, and is unpacked for it."""
        if is_quantized_linear(self.module):
            return multiply(self.module, x, bias)
        return F.linear(x, self._weight(), bias)

    def _embedding(self, tokens: torch.Tensor) -> torch.Tensor:
        cut = self.plan.weight
        assert cut is not None
        if cut.shard_dim is None:
            y: torch.Tensor = self._whole(tokens)
            return y
        if cut.shard_dim == 1:
            y = gather_last_dim(self._rows(tokens, 0), cut.shape[1], self.group)
        else:
            start, stop = shard_range(cut.shape[0], self.mesh.get_local_rank(), self.mesh.size())
            is_ours = (tokens >= start) & (tokens < stop)
            own = (tokens - start).clamp(0, max(stop - start - 1, 0))
            rows = self._rows(own, start)
            y = reduce_partial(rows * is_ours.unsqueeze(-1).to(rows.dtype), self.group)
        scale = getattr(self.module, "embed_scale", None)
        return y if scale is None else y * torch.as_tensor(scale, device=y.device).to(y.dtype)

    def _rows(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Rows of this rank's W; the padding token's gets no gradient."""
        weight, padding = self._weight(), getattr(self.module, "padding_idx", None)
        if padding is not None and not 0 <= padding - start < weight.shape[0]:
            padding = None
        return F.embedding(own, weight, padding_idx=None if padding is None else padding - start)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        with self._leaves():
            return own_forward(self.module)(*args, **kwargs)

    @contextlib.contextmanager
    def _leaves(self) -> Iterator[None]:
        """While open, the module finds leaves where its parameters are."""
        parameters: dict[str, Any] = vars(self.module)["_parameters"]
        originals = {leaf: parameters[leaf] for leaf in self.factors}
        parameters.update({leaf: factor.local() for leaf, factor in self.factors.items()})
        try:
            yield
        finally:
            parameters.update(originals)


def local_module_of(module: nn.Module) -> LocalModule | None:
    """What has taken the place of a module's forward, if it is one of these."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, LocalModule) else None


def local_tensor(module: nn.Module, leaf: str) -> torch.Tensor | None:
    """This rank's piece of a module's parameter; the leaf, where it is trained in place."""
    owner = local_module_of(module)
    if owner is not None:
        return owner.tensor(leaf)
    parameter = module._parameters.get(leaf)
    return None if parameter is None else local_shard(parameter)
