"""A decoder on each rank's tokens: split, gathered for units, scattered after them, gathered.

    # B rows   T tokens   H hidden size   P tp_size

    entry      x [B, T, H]                 -> x[:, own]         [B, T/P, H]
    unit       all-gather  x_k [B, T/P, H] -> x [B, T, H];  y = sum over ranks, each its tokens
    exit       all-gather  h_k [B, T/P, H] -> h [B, T, H]

While gradients are kept, and then always: what is partial is settled by the plan. Without them, as
in evaluation and generation, every rank runs whole sequences. T need not divide by P.

Column-parallel layers of a unit share the gathered input, whose gradient a reduce-scatter sums and
cuts in one; row-parallel ones that end a unit scatter their sum. Layers without an adapter are
given forwards of our own for this: what transformers puts around them sums for all tokens.

Communication, of a unit: forward, one all-gather of [B, T/P, H] and one reduce-scatter of
    [B, T, H]; backward, the same two. Experts communicate in themselves as ever, and what they give
    is split: forward, one all-gather beside it, backward one of the output's gradient.
At the exit: forward, one all-gather; at the entry: backward, one all-gather, if anything below is
    trained.

Source: Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tplora.adapter.linear import RowParallelLoraLinear, TploraLinear
from tplora.adapter.local_module import LocalModule, local_module_of
from tplora.collectives.operators import (
    gather_tokens,
    reduce_partial,
    scatter_partial,
    split_tokens,
)
from tplora.errors import PlanError, ShardError
from tplora.plan.sequence import modules_of, with_token_gradients
from tplora.plan.style import AROUND_EXPERTS, STYLES, shard_range
from tplora.plan.trained import plan_part
from tplora.upstream import own_forward
from tplora.upstream.decoder import around_checkpoints
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.build import Plan
    from tplora.plan.layer import LayerPlan
    from tplora.plan.sequence import SequencePlan, UnitPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["CutSequence", "cut_sequence"]

_ALL_TOKENS = ("output_hidden_states", "output_attentions")
"""What a decoder would give of every layer, which has its tokens only."""


class CutSequence:
    """Cuts the sequence of a model that has its adapter on it.

    Args:
        base: The base, adapters in place; its modules are hooked.
        plan: With a plan of the sequence.
        mesh: The tp mesh.
        shared_input: ``replicate_input`` for layers that read one tensor.
    """

    def __init__(
        self, base: PreTrainedModel, plan: Plan, mesh: DeviceMesh, shared_input: SharedInput
    ) -> None:
        assert plan.sequence is not None
        self._base, self._plan, self._sequence = base, plan, plan.sequence
        self._mesh, self._shared_input = mesh, shared_input
        self._group: ProcessGroup = mesh.get_group()
        self._length: int | None = None
        """Tokens of all ranks, while what runs has its rank's only."""
        self._is_inside = False
        """Whether the decoder runs, or what is computed again of it."""
        self._is_cut = False
        """Whether its sequence is to be cut."""
        self.take_linears()
        self._watch(self._sequence)

    def __deepcopy__(self, _memo: dict[int, Any]) -> CutSequence:
        """PEFT copies modules that it trains, hooks and all."""
        return self

    def planned(
        self, layers: tuple[LayerPlan, ...], trained: tuple[TrainedPlan, ...]
    ) -> tuple[tuple[LayerPlan, ...], tuple[TrainedPlan, ...]]:
        """The plans of an adapter that is added, in which what works on tokens is partial.

        Raises:
            PlanError: If it trains a layer whole that scatters its sum.
        """
        scattered = sorted(modules_of(trained) & self._sequence.rows)
        if scattered:
            raise PlanError(
                [
                    f"lora.modules_to_save: {scattered[0]} gives each rank its tokens, because "
                    "parallel.sequence_parallel = true; attach this adapter as the first one"
                ]
            )
        return with_token_gradients(self._sequence, layers, trained)

    def take_linears(self) -> None:
        """Have cut linears of units read what was gathered; again after an adapter was added."""
        parts = {part.name: part for part in self._plan.facts.parts}
        for name in _linears_in_units(self._plan, self._sequence):
            module = self._base.get_submodule(name)
            is_bare = type(module) is nn.Linear or is_quantized_linear(module)
            if is_bare and local_module_of(module) is None:
                plan = plan_part(parts[name], "module", (), self._plan.tp_size)
                LocalModule(module, plan, {}, self._mesh, self._shared_input)
        for name in self._sequence.rows:
            row: Any = self._base.get_submodule(name)
            if not isinstance(row, TploraLinear):
                row = local_module_of(row)
            assert isinstance(row, (RowParallelLoraLinear, LocalModule))
            row.reduce = self.reduce

    def _watch(self, sequence: SequencePlan) -> None:
        decoder = self._base.get_submodule(sequence.decoder)
        decoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        decoder.register_forward_hook(self._leave, always_call=True)
        entry = self._base.get_submodule(sequence.entry)
        entry.register_forward_pre_hook(self._split, with_kwargs=True)
        for unit in sequence.units:
            module = self._base.get_submodule(unit.name)
            module.register_forward_pre_hook(partial(self._gather, unit), with_kwargs=True)
            module.register_forward_hook(partial(self._scatter, unit))
        for name in sequence.dropouts:
            module = self._base.get_submodule(name)
            vars(module)["forward"] = partial(self._drop, module)

    def _enter(self, module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Pre-hook of the decoder."""
        self._is_inside, self._is_cut = True, torch.is_grad_enabled()
        self._length = None
        if not self._is_cut:
            return
        around_checkpoints(module, lambda: partial(self._at, self._length))
        config = self._base.config.get_text_config()
        for name in _ALL_TOKENS:
            given = kwargs.get(name)
            if given or (given is None and getattr(config, name, False)):
                raise ShardError(
                    f"{name} = True: each rank has some tokens of every layer where "
                    "parallel.sequence_parallel = true; ask under torch.no_grad, or set it to false"
                )

    def _leave(self, _module: nn.Module, _args: Any, outputs: Any) -> Any:
        """Hook of the decoder, called even when it raised."""
        length, self._length, self._is_inside = self._length, None, False
        self._shared_input.clear()  # the last unit's input, all tokens of it
        if length is None or outputs is None:
            return None
        if not hasattr(outputs, "keys"):
            raise ShardError(
                "return_dict = False: the decoder's output of tokens is found by its name where "
                "parallel.sequence_parallel = true; leave return_dict out"
            )
        found = outputs[self._sequence.output]
        self._check(found, length, "the decoder")
        outputs[self._sequence.output] = gather_tokens(found, length, self._group)
        return outputs

    def _split(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pre-hook of the first layer; of its first call, where layers run more than once."""
        if not self._is_cut or not self._is_inside or self._length is not None:
            return None
        whole = args[0] if args else kwargs["hidden_states"]
        self._length = whole.shape[1]
        own = split_tokens(whole, self._group)
        return ((own, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": own})

    def _gather(self, unit: UnitPlan, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Pre-hook of a unit."""
        if self._length is None:
            self._check_inside(unit)
            return None
        given = dict(enumerate(args)) | kwargs
        for key in unit.inputs:
            own = given[key]
            self._check(own, self._length, unit.name)
            given[key] = gather_tokens(own, self._length, self._group)
            self._shared_input.note_gathered(given[key], own)
        return tuple(given[k] for k in range(len(args))), {name: given[name] for name in kwargs}

    def _scatter(self, unit: UnitPlan, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Hook of a unit."""
        if self._length is None:
            return None
        given = list(output) if isinstance(output, (tuple, list)) else [output]
        for k, (place, shape) in enumerate(unit.outputs):
            found = given[place or 0]
            if unit.row is not None and k == 0:
                self._check(found, self._length, unit.name)
            elif tuple(found.shape[1:]) == (self._length, *shape):
                given[place or 0] = split_tokens(found, self._group)
            else:
                raise _other(unit.name, (self._length, *shape), found)
        return type(output)(given) if isinstance(output, (tuple, list)) else given[0]

    def reduce(self, y: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """The sum of a row-parallel layer that ends a unit: this rank's tokens of it, or all."""
        return reduce_partial(y, group) if self._length is None else scatter_partial(y, group)

    def _drop(self, dropout: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        """Dropout on tokens: the mask that one process draws for all of them, cut as they are."""
        if self._length is None or not dropout.training or dropout.p == 0:
            return own_forward(dropout)(x)
        mask = F.dropout(x.new_ones((x.shape[0], self._length, *x.shape[2:])), dropout.p)
        return x * mask[:, slice(*self._own(self._length))]

    def _own(self, length: int) -> tuple[int, int]:
        return shard_range(length, self._mesh.get_local_rank(), self._mesh.size())

    def _check(self, found: torch.Tensor, length: int, where: str) -> None:
        start, stop = self._own(length)
        if found.shape[1] != stop - start:
            raise _other(where, (stop - start,), found)

    def _check_inside(self, unit: UnitPlan) -> None:
        if torch.is_grad_enabled() and not self._is_inside:
            raise ShardError(
                f"{unit.name}: runs outside of its model, where it is not known whether it is "
                "given all tokens (parallel.sequence_parallel = true); checkpoint activations with "
                "model.gradient_checkpointing_enable, in no other way"
            )

    @contextlib.contextmanager
    def _at(self, length: int | None) -> Iterator[None]:
        """While open, layers run as they did in the forward that is computed again."""
        before = self._length, self._is_inside
        self._length, self._is_inside = length, True
        try:
            yield
        finally:
            self._length, self._is_inside = before


def cut_sequence(
    base: PreTrainedModel, plan: Plan, mesh: DeviceMesh | None, shared_input: SharedInput
) -> CutSequence | None:
    """Cut the sequence if the plan says so."""
    if plan.sequence is None or mesh is None:
        return None
    return CutSequence(base, plan, mesh, shared_input)


def _linears_in_units(plan: Plan, sequence: SequencePlan) -> Iterator[str]:
    """Linears of units that are cut by themselves; those of experts are run by their owner."""
    units = {unit.name for unit in sequence.units}
    owners = tuple(f"{name}." for name, style in plan.facts.styles if style in AROUND_EXPERTS)
    for part in plan.facts.parts:
        style = STYLES["linear"].get(part.style)
        is_cut = style is not None and style.weight_shard_dim is not None
        if part.kind == "linear" and is_cut and not part.name.startswith(owners):
            above = part.name.split(".")
            if any(".".join(above[:k]) in units for k in range(1, len(above) + 1)):
                yield part.name


def _other(where: str, wanted: tuple[int, ...], found: torch.Tensor) -> ShardError:
    return ShardError(
        f"{where}: has tokens of shape {tuple(found.shape[1:])}, the plan says {wanted} "
        "(parallel.sequence_parallel = true); set it to false and report this"
    )
