"""Forward of a frozen linear plus its adapter on local shards, one small class per parallel state.

    # T tokens   I in_features   O out_features   R LoRA rank r   P tp_size

The classes are PEFT's own ``lora.Linear`` with the full sizes, so that configs, names, files,
merging and switching stay PEFT's. Only ``forward`` is ours: base and adapter on this rank's pieces,
and the style's collective once, on their sum, since both are in the same state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import nn

from tplora.adapter.factor import Factors, delta_like, factors_of, factors_of_linears
from tplora.adapter.initial import FromWholeWeight
from tplora.adapter.local_module import local_tensor
from tplora.adapter.merging import MergesLocally, refuse_packed
from tplora.adapter.project_down import can_project_down, project_down, project_up
from tplora.adapter.variants import LINEAR_VARIANTS, LocalVariant, take_context
from tplora.base.quantized_product import multiply
from tplora.collectives.operators import gather_last_dim, reduce_partial, split_last_dim
from tplora.upstream import local_shard, transform_output
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tplora.collectives.late_gradients import LateGradients
    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.layer import LayerPlan

__all__ = ["ColumnParallelLoraLinear", "ReplicatedLoraLinear", "RowParallelLoraLinear",
           "TploraLinear"]  # fmt: skip


class TploraLinear(FromWholeWeight, MergesLocally, lora.Linear):  # type: ignore[misc]
    """What the three parallel states share: full sizes, local factors, the delta.

    Args:
        base_layer: The frozen linear, or PEFT's layer around it.
        adapter_name: The first adapter.
        plan: How this layer is cut.
        mesh: The tp mesh, or None in one process.
        shared_input: ``replicate_input`` for layers that read one tensor.
        kwargs: What PEFT passes to its own layer.
    """

    adds_bias_after_sum = False
    """Whether biases are added to the sum of the ranks' products, not to each product."""

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
        self.plan, self.mesh = plan, mesh  # before PEFT, which asks for the sizes
        super().__init__(base_layer, adapter_name, **kwargs)
        self.shared_input = shared_input
        self.reduce: Callable[[torch.Tensor, ProcessGroup], torch.Tensor] = reduce_partial
        """How the ranks' products of a row-parallel layer become one."""
        self.factors: dict[str, Factors] = {}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        """The full sizes: PEFT would take this rank's, and draw A for another fan-in."""
        out_features, in_features = self.plan.weight.shape
        return in_features, out_features

    @property
    def lora_variants(self) -> dict[tuple[str, ...], type[LocalVariant] | None]:
        """What PEFT builds for the fields of a config that change what an adapter computes."""
        return LINEAR_VARIANTS

    @property
    def group(self) -> ProcessGroup:
        """The tensor-parallel process group."""
        return self.mesh.get_group()  # type: ignore[union-attr]

    def make_factors(self, adapter_name: str, prefix: str, plan: LayerPlan) -> Factors:
        """Cut the factors, which PEFT has just drawn in full, to this rank's pieces."""
        self.factors[adapter_name] = factors_of_linears(self, adapter_name, prefix, plan)
        return self.factors[adapter_name]

    def variant_of(self, name: str) -> LocalVariant | None:
        """What an adapter computes if it is not plain LoRA."""
        variant: LocalVariant | None = self.lora_variant.get(name)
        return variant

    def applied_adapters(self) -> list[str]:
        """The adapters that take part in a forward, in the order in which they do."""
        if self.disable_adapters or self.merged:
            return []
        return [name for name in self.active_adapters if name in self.lora_A]

    def adapter_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """This rank's pieces of an adapter's factors, and what its variant makes of them."""
        tensors = {what: factor.local() for what, factor in factors_of(self.factors, name).items()}
        variant = self.variant_of(name)
        return tensors if variant is None else tensors | variant.constants(self, name, tensors)

    def apply_adapter(
        self,
        name: str,
        result: torch.Tensor,
        dropped: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        **context: Any,
    ) -> torch.Tensor:
        """``result + scaling * dropped A^T B^T`` (or its variant's formula) on this rank's pieces.

        Args:
            name: The adapter.
            result: The base's product, and the adapters' before this one.
            dropped: The input, after dropout.
            tensors: What ``adapter_tensors`` gave.
            context: ``bias``, which result holds already, and what the caller of forward gave.
        """
        if (variant := self.variant_of(name)) is not None:
            return variant.apply(self, name, result, dropped, tensors, **context)
        return self._add_up(name, result, F.linear(dropped, tensors["A"]), tensors)

    def drop(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The input of an adapter's A: in A's dtype, after the adapter's dropout."""
        dtype = factors_of(self.factors, name)["A"].local().dtype
        dropped: torch.Tensor = self.lora_dropout[name](self._cast_input_dtype(x, dtype))
        return dropped

    def add_delta(self, result: torch.Tensor, x: torch.Tensor, **context: Any) -> torch.Tensor:
        """``result`` with the delta of every active adapter, in result's dtype.

        x and result are this rank's pieces, in the layer's state. Communication: a variant's.
        """
        dtype = result.dtype
        for name in self.applied_adapters():
            tensors = self.adapter_tensors(name)
            dropout = self.lora_dropout[name]
            if self.variant_of(name) is None and can_project_down(dropout, x):
                late = self.shared_input.late_gradients(x)
                down = project_down(x, tensors["A"], dropout, late)
                result = self._add_up(name, result, down, tensors, late)
                continue
            result = self.apply_adapter(name, result, self.drop(name, x), tensors, **context)
        return result.to(dtype)

    def _add_up(
        self,
        name: str,
        result: torch.Tensor,
        down: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        late: LateGradients | None = None,
    ) -> torch.Tensor:
        b, scaling = tensors["B"], float(self.scaling[name])
        bias = None if self.adds_bias_after_sum else tensors.get("bias")
        if late is not None and bias is None:
            return result + project_up(down, b, late) * scaling
        if bias is None and result.dtype == down.dtype == b.dtype:  # one pass over y, not three
            rows, own = result.reshape(-1, result.shape[-1]), down.reshape(-1, down.shape[-1])
            return torch.addmm(rows, own, b.t(), alpha=scaling).view(result.shape)
        return result + F.linear(down, b, bias) * scaling

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """``scaling * B A``, placed as W is; PEFT merges it. No communication.

        Raises:
            PlanError: If W is quantised.
        """
        refuse_packed(self.get_base_layer())
        factors = factors_of(self.factors, adapter)
        a, b = factors["A"].local(), factors["B"].local()
        return delta_like(self.get_base_layer().weight, (b @ a) * self.scaling[adapter])

    def base_product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """This rank's ``x W^T + bias``; a quantised W is unpacked for it. No communication."""
        base = self.get_base_layer()
        if is_quantized_linear(base):
            return multiply(base, x, bias)
        return F.linear(x, weight, bias)

    def base_shards(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's pieces of W, packed where it is quantised, and of the bias.

        The bias may be trained.
        """
        base = self.get_base_layer()
        return local_shard(base.weight), local_tensor(base, "bias")

    def added_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The base's bias and those of the adapters' B, where they are added after the sum."""
        for name in self.applied_adapters():
            tensors = {what: factor.local() for what, factor in self.factors[name].items()}
            if "bias" in tensors:
                own = tensors["bias"] * self.scaling[name]
                bias = own if bias is None else bias + own
        return bias

    def extra_repr(self) -> str:
        """Full sizes and cut."""
        cut = {None: "replicated", 0: "cut on out", 1: "cut on in"}[self.plan.weight.shard_dim]
        ranks = 1 if self.mesh is None else self.mesh.size()
        return f"in={self.plan.weight.shape[1]}, out={self.plan.weight.shape[0]}, W {cut} / {ranks}"


class ReplicatedLoraLinear(TploraLinear):
    """A linear that every rank holds whole, with its adapter; also every linear at tp_size 1.

        y = x W^T + b + scaling * (dropout(x) A^T) B^T

    Shapes, per rank: x ``[T, I]``, W ``[O, I]``, A ``[R, I]``, B ``[O, R]``, y ``[T, O]``, all
    replicated; pieces of heads, and partial gradients, under style replicated_with_grad_allreduce.

    What the style does to the output (mla_kv_a_proj: the rope slice of y goes to sharded heads, so
    its gradient is summed), it does after the adapter has joined.

    Communication: none; mla_kv_a_proj: backward, one all-reduce of the rope slice.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The base's own forward plus the delta, then what the style does to an output."""
        context = take_context(kwargs)
        weight, bias = self.base_shards()
        if not self.plan.transforms_output:
            return self.add_delta(self.base_layer(x, *args, **kwargs), x, bias=bias, **context)
        assert self.mesh is not None
        assert self.plan.style is not None
        y = self.add_delta(self.base_product(x, weight, bias), x, bias=bias, **context)
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
        weight, bias = self.base_shards()
        y = self.base_product(x, weight, bias)
        y = self.add_delta(y, x, bias=bias, **take_context(kwargs))
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
        y      [T, O]     replicated; [T/P, O], this rank's tokens, where the sequence is cut

    Communication: forward, one all-reduce of [T, O]; backward, none, or one all-gather of [T, I]
        when the input was split here. Where the sequence is cut, one reduce-scatter in place of the
        all-reduce, and backward one all-gather of [T/P, O].

    Source: Shoeybi et al. 2019, section 3 (g); Hu et al. 2021, equation 3.
    """

    adds_bias_after_sum = True

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Base and adapter on this rank's input features, summed over ranks."""
        if self.plan.splits_input:
            x = split_last_dim(x, self.group)
        weight, bias = self.base_shards()
        y = self.add_delta(self.base_product(x, weight, None), x, **take_context(kwargs))
        y, bias = self.reduce(y, self.group), self.added_bias(bias)
        return y if bias is None else (y + bias).to(y.dtype)
