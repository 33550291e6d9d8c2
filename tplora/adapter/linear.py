"""Forward of a frozen linear plus its adapter on local shards, one small class per parallel state.

    # T tokens   I in_features   O out_features   R LoRA rank r   P tp_size

The classes are PEFT's own ``lora.Linear`` with the full ``in_features`` and ``out_features``, so
that configs, names, files, merging and switching stay PEFT's. Only ``forward`` is ours: it computes
base and adapter on this rank's pieces and applies the style's collective once, to their sum. One
rule: the adapter's output is in the same state as its base's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import nn

from tplora.adapter.factor import Factor, delta_like, factors_of, factors_of_linears
from tplora.base.quantized_product import local_bias, multiply
from tplora.collectives import gather_last_dim, reduce_partial, split_last_dim
from tplora.errors import PlanError
from tplora.upstream import local_shard, transform_output
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.collectives import SharedInput
    from tplora.plan.layer import LayerPlan

__all__ = [
    "ColumnParallelLoraLinear",
    "ReplicatedLoraLinear",
    "RowParallelLoraLinear",
    "TploraLinear",
]


_NO_MERGE = (
    "merge: the base is quantised, and what is merged would be rounded anew; merge the saved "
    "adapter into the unquantised base with `tplora export`"
)


class TploraLinear(lora.Linear):  # type: ignore[misc]
    """What the three parallel states share: full sizes, local factors, the delta.

    Args:
        base_layer: The frozen linear, or PEFT's layer around it.
        adapter_name: The first adapter.
        plan: How this layer is cut.
        mesh: The tp mesh, or None in one process.
        shared_input: ``replicate_input`` for layers that read one tensor.
        kwargs: What PEFT passes to its own layer.
    """

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        *,
        plan: LayerPlan,
        mesh: DeviceMesh | None,
        shared_input: SharedInput,
        **kwargs: Any,
    ) -> None:
        self.plan = plan  # before PEFT, which asks for the sizes
        super().__init__(base_layer, adapter_name, **kwargs)
        self.mesh = mesh
        self.shared_input = shared_input
        self.factors: dict[str, tuple[Factor, Factor]] = {}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """The full sizes: PEFT would take this rank's, and draw A for another fan-in."""
        out_features, in_features = self.plan.weight.shape
        return in_features, out_features

    @property
    def group(self) -> ProcessGroup:
        """The tensor-parallel process group."""
        assert self.mesh is not None
        return self.mesh.get_group()

    def make_factors(
        self, adapter_name: str, prefix: str, plan: LayerPlan
    ) -> tuple[Factor, Factor]:
        """Cut A and B, which PEFT has just drawn in full, to this rank's pieces."""
        self.factors[adapter_name] = factors_of_linears(self, adapter_name, prefix, plan)
        return self.factors[adapter_name]

    def add_delta(self, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``result + sum over active adapters of scaling * dropout(x) A^T B^T``, in result's dtype.

        x and result are this rank's pieces, in the state of the layer. No communication.
        """
        if self.disable_adapters or self.merged:
            return result
        dtype = result.dtype
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            a, b = (factor.local() for factor in factors_of(self.factors, name))
            dropped = self.lora_dropout[name](self._cast_input_dtype(x, a.dtype))
            result = result + F.linear(F.linear(dropped, a), b) * self.scaling[name]
        return result.to(dtype)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """``scaling * B A``, placed as W is; PEFT merges it. No communication.

        Raises:
            PlanError: If W is quantised: it would be rounded anew, to another model.
        """
        if is_quantized_linear(self.get_base_layer()):
            raise PlanError([_NO_MERGE])
        a, b = (factor.local() for factor in factors_of(self.factors, adapter))
        return delta_like(self.get_base_layer().weight, (b @ a) * self.scaling[adapter])

    def base_product(self, x: torch.Tensor, *, adds_bias: bool = True) -> torch.Tensor:
        """This rank's ``x W^T``, and the bias where it is not added later. No communication."""
        base = self.get_base_layer()
        if is_quantized_linear(base):
            return multiply(base, x, local_bias(base) if adds_bias else None)
        weight, bias = self.base_shards()
        return F.linear(x, weight, bias if adds_bias else None)

    def base_shards(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's pieces of W and of the bias; W is not quantised."""
        base = self.get_base_layer()
        assert not is_quantized_linear(base), "the plan refuses what reads a quantised W"
        return local_shard(base.weight), None if base.bias is None else local_shard(base.bias)

    def extra_repr(self) -> str:
        """The full sizes and the cut, for ``print(model)``."""
        ranks = 1 if self.mesh is None else self.mesh.size()
        cut = {None: "replicated", 0: "cut on out", 1: "cut on in"}[self.plan.weight.shard_dim]
        return f"in={self.plan.weight.shape[1]}, out={self.plan.weight.shape[0]}, W {cut} / {ranks}"


class ReplicatedLoraLinear(TploraLinear):
    """A linear that every rank holds whole, with its adapter; also every linear at tp_size 1.

        y = x W^T + b + scaling * (dropout(x) A^T) B^T

    Shapes, per rank: x ``[T, I]``, W ``[O, I]``, A ``[R, I]``, B ``[O, R]``, y ``[T, O]``, all
    replicated. Where the activations are shards of heads (style replicated_with_grad_allreduce),
    x and y are pieces, and both factors' gradients are partial.

    Where the style does something of its own to the output (mla_kv_a_proj: the rope slice of y
    goes to sharded heads, so its gradient is summed), the adapter joins before that.

    Communication: none; mla_kv_a_proj: backward, one all-reduce of the rope slice.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base's own forward plus the delta, then what the style does to an output."""
        if not self.plan.transforms_output:
            return self.add_delta(self.base_layer(x, *args, **kwargs), x)
        assert self.mesh is not None
        assert self.plan.style is not None
        y = self.add_delta(self.base_product(x), x)
        return transform_output(self.plan.style, self.get_base_layer(), y, self.mesh)


class ColumnParallelLoraLinear(TploraLinear):
    """A frozen column-parallel linear with its adapter.

        y_k = x W_k^T + b_k + scaling * (dropout(x) A^T) B_k^T

    The input is replicated and feeds every rank's shard, so its gradient is a partial sum: one
    all-reduce serves base and adapter, and all layers that read the same tensor. A is replicated
    and its gradient partial; B is cut like W.

    Shapes, per rank:
        x      [T, I]     replicated
        W      [O/P, I]   sharded    frozen
        A      [R, I]     replicated
        B      [O/P, R]   sharded
        y      [T, O/P]   sharded; [T, O] replicated when the style gathers its output

    Communication: forward, none, or one all-gather of [T, O] when gathered; backward, one
        all-reduce of [T, I] for all layers that read x.

    Source: Shoeybi et al. 2019, section 3 (f); Hu et al. 2021, equation 3.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Base and adapter on this rank's output features."""
        x = self.shared_input(x)
        y = self.add_delta(self.base_product(x), x)
        if self.plan.gathers_output:
            return gather_last_dim(y, self.plan.weight.shape[0], self.group)
        return y


class RowParallelLoraLinear(TploraLinear):
    """A frozen row-parallel linear with its adapter.

        y = b + sum over ranks of [ x_k W_k^T + scaling * (dropout(x)_k A_k^T) B^T ]

    The adapter joins the base before the base's own reduction: both are partial sums, so one
    all-reduce serves both, and the bias is added once after it. B is replicated, but each rank has
    seen only its slice of the input, so B's gradient is partial.

    Shapes, per rank:
        x      [T, I/P]   sharded; [T, I] replicated when the style splits its input
        W      [O, I/P]   sharded    frozen
        A      [R, I/P]   sharded
        B      [O, R]     replicated
        y      [T, O]     replicated

    Communication: forward, one all-reduce of [T, O]; backward, none, or one all-gather of [T, I]
        when the input was split here.

    Source: Shoeybi et al. 2019, section 3 (g); Hu et al. 2021, equation 3.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Base and adapter on this rank's input features, summed over ranks."""
        if self.plan.splits_input:
            x = split_last_dim(x, self.group)
        y = reduce_partial(self.add_delta(self.base_product(x, adds_bias=False), x), self.group)
        bias = local_bias(self.get_base_layer())
        return y if bias is None else y + bias.to(y.dtype)
