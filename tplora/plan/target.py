"""From ``target_modules`` and ``target_parameters`` to names, by PEFT's rules; all must match.

PEFT adapts a module by what it is (a linear or an embedding: ``base(x) + delta(x)``) or one of its
parameters (``W + delta weight`` inside the module's own forward). Expert weights and routers have
no other way, and neither has a subclass of ``nn.Linear`` whose forward does more than multiply:
such modules are adapted by their ``weight`` though they were named as modules.

No name is moved: PEFT gives ``gate_proj`` and its like of some mixture-of-experts models to the
expert weights, also where a dense or shared MLP carries the name. Here a name means the modules
that have it, and experts are named by their parameters.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.errors import PlanError
from tplora.plan.excluded import excluded_problems
from tplora.recipe.pattern_rules import MATCHED, say_pattern
from tplora.upstream import adapter_target_names, peft_moved_names, peft_refusal
from tplora.upstream.peft_keys import peft_file_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.plan.facts import ModelFacts

__all__ = ["Targets", "expert_names", "match_targets", "without_adapter_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What an adapter is put on, by full names, in the order in which PEFT meets them."""

    modules: tuple[str, ...]
    """Linears and embeddings: the delta is added to their output."""
    parameters: tuple[str, ...]
    """Parameters whose delta weight is added inside their module's own forward."""


def expert_names(facts: ModelFacts) -> tuple[str, ...]:
    """Every stack of expert weights, the way ``target_parameters`` names them: without layers."""
    names = {".".join(parameter.name.split(".")[-3:]) for parameter in facts.with_role("experts")}
    return tuple(sorted(names))


def match_targets(model: PreTrainedModel, config: LoraConfig, facts: ModelFacts) -> Targets:
    """What ``config`` adapts.

    Raises:
        PlanError: For every entry that matches nothing, with the near names; when all of them
            together, less ``exclude_modules``, leave nothing; when PEFT itself refuses one; or for
            every field that is no regular expression and should be one.
    """
    unreadable = list(_unreadable_fields(config))
    if unreadable:
        raise PlanError(unreadable)
    if not config.target_modules and not config.target_parameters:
        available = ", ".join(_leaves(facts))
        raise PlanError(
            [f"lora.target_modules: missing; the model has {available}, or 'all-linear'"]
        )
    names = tuple(adapter_target_names(model, config)) if config.target_modules else ()
    matched = _match_parameters(config, facts)
    problems = [*_unmatched_modules(config, names, model, facts), *_unmatched(config, facts)]
    problems += [*_layer_problems(config), *excluded_problems(config, facts)]
    problems += [
        f"lora.target_modules: {name}: {refusal}; add it to lora.exclude_modules"
        for name in names
        if (refusal := peft_refusal(config, model, name)) is not None
    ]
    targets = _by_kind(names, matched, facts)
    problems += _unreadable(targets, model, config)
    if problems:
        raise PlanError(problems)
    return targets


def _unreadable_fields(config: LoraConfig) -> Iterator[str]:
    for key in MATCHED:
        value = getattr(config, key)
        message = say_pattern(key, value)
        if message:
            yield f"lora.{key} = {value!r}: {message}"


def _by_kind(names: Iterable[str], matched: Iterable[str], facts: ModelFacts) -> Targets:
    """Plain layers are adapted as modules and all else by its weight, however it was named."""
    plain = {module.name for module in facts.modules if module.has_plain_forward}
    special = {p.name for p in facts.parameters if p.role != "other"}
    modules: list[str] = []
    parameters: list[str] = []
    for name in names:
        is_special = f"{name}.weight" in special and name not in plain
        (parameters if is_special else modules).append(f"{name}.weight" if is_special else name)
    for name in matched:
        owner = name.removesuffix(".weight")
        is_plain = owner in plain
        (modules if is_plain else parameters).append(owner if is_plain else name)
    return Targets(
        modules=tuple(dict.fromkeys(modules)), parameters=tuple(dict.fromkeys(parameters))
    )


def _match_parameters(config: LoraConfig, facts: ModelFacts) -> tuple[str, ...]:
    """Parameters named by ``target_parameters``: the whole name, or its end after a dot."""
    entries = tuple(f".{entry}" for entry in config.target_parameters or ())
    return (
        tuple(p.name for p in facts.parameters if f".{p.name}".endswith(entries)) if entries else ()
    )


def _unmatched_modules(
    config: LoraConfig, names: tuple[str, ...], model: PreTrainedModel, facts: ModelFacts
) -> list[str]:
    given = config.target_modules
    everything = [name for name, _ in model.named_modules()]
    problems = []
    if given and not isinstance(given, str):
        problems = [
            f"lora.target_modules: {entry!r} matches no module; {_near(entry, facts)}"
            for entry in sorted(given)
            if not any(f".{name}".endswith(f".{entry}") for name in everything)
        ]
    if not problems and given and not names:
        problems = [
            f"lora.target_modules = {given!r}: matches no module that exclude_modules and "
            f"layers_to_transform leave; {_near('', facts)}"
        ]
    return problems


def _unmatched(config: LoraConfig, facts: ModelFacts) -> list[str]:
    """Entries of ``target_parameters`` that name nothing."""
    names = [f".{parameter.name}" for parameter in facts.parameters]
    available = sorted(
        {
            ".".join(p.name.split(".")[-2:])
            for p in facts.parameters
            if p.role in ("experts", "router")
        }
    )
    return [
        f"lora.target_parameters: {entry!r} matches no parameter; "
        + (f"the model has {', '.join(available)}" if available else "the model has no experts")
        for entry in sorted(config.target_parameters or ())
        if not any(name.endswith(f".{entry}") for name in names)
    ]


def _unreadable(targets: Targets, model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names whose factors plain PEFT would not find in any file."""
    owners = {name: name for name in targets.modules}
    owners |= {name: name.rpartition(".")[0] for name in targets.parameters}
    keys = {name: f"base_model.model.{owner}.lora_A.weight" for name, owner in owners.items()}
    readable = peft_file_keys(model, config, keys.values())
    return [
        f"lora.target_modules: {name}: peft renames what it reads of it and would not find it "
        "again; add it to lora.exclude_modules"
        for name, key in keys.items()
        if readable[key] is None
    ]


def _layer_problems(config: LoraConfig) -> list[str]:
    """PEFT ignores the choice of layers where parameters are named."""
    if not config.target_parameters or config.layers_to_transform is None:
        return []
    return [
        f"lora.layers_to_transform = {config.layers_to_transform!r}: does not apply to "
        "target_parameters in peft; name the parameters of those layers in full"
    ]


def _leaves(facts: ModelFacts) -> list[str]:
    return sorted({module.name.rpartition(".")[2] for module in facts.modules if module.kind})


def _near(entry: str, facts: ModelFacts) -> str:
    available = _leaves(facts)
    leaf = entry.rpartition(".")[2]
    experts = expert_names(facts)
    if experts and leaf in peft_moved_names(facts.model_type):
        return (
            f"its expert weights are parameters: set lora.experts = true, or "
            f"lora.target_parameters = {list(experts)}"
        )
    near = difflib.get_close_matches(entry, available, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return f"{hint}the model has {', '.join(available)}"


def without_adapter_parts(targets: Targets, facts: ModelFacts) -> Targets:
    """Only what the base itself has: lora_A and lora_B of other adapters are linears as well."""
    known = {module.name for module in facts.modules}
    return Targets(
        modules=tuple(name for name in targets.modules if name in known),
        parameters=targets.parameters,
    )
