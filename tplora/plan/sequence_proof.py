"""Whether a decoder may run on each rank's tokens: shown on numbers, before any weight is read.

    all tokens:   units give random numbers; their arguments and the output are noted
    rank k:       units give rank k's tokens of these; arguments and output have to be rank k's, too

Units, the modules that hold matrices, are stood in for, since they are given whole sequences. What
is run is all the code around them, the model's own: residual sums, norms, scaling, what goes from
layer to layer. Code that shifts, pads, masks or sums over tokens there, or brings along something
of all tokens, gives other numbers, or shapes that do not fit, and the model is refused by name. No
list of architectures is kept.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tplora.errors import PlanError
from tplora.plan.sequence import SequencePlan, UnitPlan
from tplora.plan.sequence_numbers import (
    MixedError,
    NumbersRun,
    is_on_tokens,
    numbers_like,
    token_outputs,
)
from tplora.plan.sequence_record import ROWS, Record, record_decoder
from tplora.plan.style import AROUND_EXPERTS, STYLES, shard_range
from tplora.upstream.decoder import decoder_of, fresh_meta_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from tplora.plan.facts import ModelFacts

__all__ = ["plan_sequence"]

_LENGTHS = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)
_MOST_SAID = 150
"""Characters of an error of torch's."""


def plan_sequence(model: PreTrainedModel, facts: ModelFacts, tp_size: int) -> SequencePlan:
    """How the decoder of ``model`` runs on each rank's tokens.

    Args:
        model: Only its class and config are used.
        facts: Of it.
        tp_size: Ranks that share a sequence.

    Raises:
        PlanError: If its code around attention, MLP and experts does not work token by token.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _Proof(fresh_meta_model(model), facts, tp_size).sequence()
    except MixedError as mixed:
        reason = str(mixed)
    except Exception as error:  # whatever a model's own code does
        first = str(error).partition("\n")[0][:_MOST_SAID]
        reason = f"its code does not run on some of the tokens ({type(error).__name__}: {first})"
    raise PlanError(
        [
            f"parallel.sequence_parallel = true: {facts.class_name} cannot have its sequence cut "
            f"over ranks: {reason}; set parallel.sequence_parallel = false"
        ]
    )


class _Proof:
    """One model, whole and without weights, and what is filled in of it."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, tp_size: int) -> None:
        self._model, self._tp_size = model, tp_size
        self._facts, self._styles = facts, dict(facts.styles)
        self._linears = {part.name for part in facts.parts if part.kind == "linear"}
        self._name, self._decoder = decoder_of(model)
        # A length that is nothing else: a tensor that has it has tokens.
        sizes = {size for p in model.parameters() for size in p.shape}
        sizes |= {n for n in model.config.get_text_config().to_dict().values() if type(n) is int}
        self._length = next(n for n in _LENGTHS if n not in sizes)
        self._record = record_decoder(self._name, self._decoder, self._styles, self._length)
        self._inputs: dict[str, tuple[int | str, ...]] = {}

    def sequence(self) -> SequencePlan:
        """The plan, once all of it has been shown."""
        if not self._record.entry:
            raise MixedError("transformers knows of no layers in it")
        self._fill()
        truth = NumbersRun(self._record, self._length, None)
        wanted = self._run(truth)
        output = ""
        for tp_rank in sorted({0, self._tp_size // 2, self._tp_size - 1}):
            tokens = slice(*shard_range(self._length, tp_rank, self._tp_size))
            found = NumbersRun(self._record, self._length, tokens, truth)
            output = self._output_on_tokens(self._run(found), wanted, tokens)
            if found.num_calls != truth.num_calls:
                raise MixedError("its layers call other modules for some tokens than for all")
            for name, inputs in found.inputs.items():
                if self._inputs.setdefault(name, inputs) != inputs:
                    raise MixedError(f"{name} is given tokens in one call and not in another")
        self._check_cut()
        return self._plan(output)

    def _check_cut(self) -> None:
        """No cut weight is used outside a unit, and no unit is given or gives cut features."""
        for name, style in self._styles.items():
            inside = any(f"{name}.".startswith(f"{unit}.") for unit in self._record.units)
            is_ours = name.startswith(f"{self._name}." if self._name else "")
            if is_ours and not inside:
                raise MixedError(f"{name} is cut (style {style}) outside of what holds matrices")
            if self._inputs.get(name) and not _is_whole_outside(style):
                raise MixedError(f"a layer's own code calls {name}, whose features are cut")

    def _fill(self) -> None:
        """Give numbers to everything that is not stood in for."""
        torch_state = torch.Generator().manual_seed(0)
        units = tuple(f"{name}." for name in self._record.units)
        prefix = f"{self._name}." if self._name else ""
        for path, module in self._decoder.named_modules():
            if f"{prefix}{path}.".startswith(units):
                continue
            for held in (vars(module), module._parameters, module._buffers):
                for key, tensor in list(held.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                        held[key] = numbers_like(tensor, torch_state)

    def _run(self, run: NumbersRun) -> Any:
        torch.manual_seed(0)  # what is drawn for all tokens, before they are cut, is drawn again
        ids = torch.arange(ROWS * self._length).reshape(ROWS, self._length) % 3
        with torch.no_grad(), _stood_in(self._model, self._record, run), run.entering(self._model):
            return self._decoder(
                input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            )

    def _output_on_tokens(self, found: Any, wanted: Any, tokens: slice) -> str:
        if not hasattr(found, "keys"):
            raise MixedError("its decoder gives no named outputs")
        on_tokens = [
            key for key in found if is_on_tokens(found[key], wanted[key], tokens, f"output {key}")
        ]
        if len(on_tokens) != 1:
            raise MixedError(f"its decoder gives {len(on_tokens)} outputs of tokens, not one")
        return str(on_tokens[0])

    def _plan(self, output: str) -> SequencePlan:
        after = [name for name in self._record.units if self._inputs.get(name)]
        parameters = {n for n, m in self._record.on_tokens.items() if [*m.parameters()]}
        return SequencePlan(
            decoder=self._name,
            entry=self._record.entry,
            output=output,
            units=tuple(self._unit(name) for name in after),
            on_tokens=tuple(sorted(parameters)),
            dropouts=tuple(sorted(n for n, m in self._record.on_tokens.items() if _drops(m))),
        )

    def _unit(self, name: str) -> UnitPlan:
        calls = self._record.units[name]
        kinds = {(token_outputs(call.output, self._length), call.row) for call in calls}
        if len(kinds) > 1:
            raise MixedError(f"{name} gives tokens in one call and not in another")
        ((outputs, row),) = kinds
        is_scattered = row in self._linears and outputs and outputs[0][0] in (None, 0)
        return UnitPlan(
            name=name,
            inputs=self._inputs[name],
            outputs=outputs,
            row=row if is_scattered else None,
        )


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout)


def _is_whole_outside(style: str) -> bool:
    found = STYLES["linear"].get(style)
    if found is None or found.weight_shard_dim is None:
        return style in AROUND_EXPERTS or found is not None
    return found.gathers_output or found.splits_input


@contextlib.contextmanager
def _stood_in(model: nn.Module, record: Record, run: NumbersRun) -> Iterator[None]:
    """While open, units give random numbers, and dropout drops nothing: masks are cut as tokens."""
    names = [*record.units, *(name for name, one in record.on_tokens.items() if _drops(one))]
    modules = {name: model.get_submodule(name) for name in names}
    for name, module in modules.items():
        forward: Any = _keep if _drops(module) else _call_of(run, name)
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in modules.values():
            vars(module).pop("forward", None)


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x


def _call_of(run: NumbersRun, name: str) -> Any:
    return lambda *args, **kwargs: run.call(name, args, kwargs)
