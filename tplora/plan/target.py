"""From ``target_modules`` to module names, by PEFT's rules; what matches nothing is an error."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from tplora.errors import PlanError
from tplora.upstream import adapter_target_names, peft_moved_names, peft_refusal

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.plan.facts import ModelFacts

__all__ = ["match_targets"]


def match_targets(model: PreTrainedModel, config: LoraConfig, facts: ModelFacts) -> tuple[str, ...]:
    """The names of the modules that ``config`` adapts, in the order in which PEFT adapts them.

    Raises:
        PlanError: For every entry of ``target_modules`` that matches nothing, with the near names;
            or when all of them together, less ``exclude_modules``, leave nothing.
    """
    available = sorted({module.name.rpartition(".")[2] for module in facts.modules if module.kind})
    if not config.target_modules:
        raise PlanError(
            [f"lora.target_modules: missing; the model has {', '.join(available)}, or 'all-linear'"]
        )
    names = tuple(adapter_target_names(model, config))
    problems = [
        f"lora.target_modules: {entry!r} matches no module; {_near(entry, available)}"
        for entry in _unmatched(config, [name for name, _ in model.named_modules()])
    ]
    if not problems and not names:
        problems = [
            f"lora.target_modules = {config.target_modules!r}: matches no module that "
            f"exclude_modules and layers_to_transform leave; {_near('', available)}"
        ]
    problems += _moved(config, names, facts)
    problems += [
        f"lora.target_modules: {name}: {refusal}; add it to lora.exclude_modules"
        for name in names
        if (refusal := peft_refusal(config, model, name)) is not None
    ]
    if problems:
        raise PlanError(problems)
    return names


def _moved(config: LoraConfig, names: tuple[str, ...], facts: ModelFacts) -> list[str]:
    """Names that PEFT would silently move from these modules onto the experts."""
    moved = peft_moved_names(facts.model_type)
    given = config.target_modules
    is_all = isinstance(given, str) and given.lower() == "all-linear"
    hit = sorted({leaf for name in names if (leaf := name.rpartition(".")[2]) in moved})
    if not moved or not (is_all or hit):
        return []
    left = sorted({name.rpartition(".")[2] for name in names} - moved)
    found = "'all-linear'" if is_all else ", ".join(hit)
    return [
        f"lora.target_modules = {found}: peft moves {', '.join(sorted(moved))} of a "
        f"{facts.model_type} model onto its experts, which cannot be cut with an adapter yet; "
        f"name others: {', '.join(left)}"
    ]


def _unmatched(config: LoraConfig, names: list[str]) -> list[str]:
    """Entries of a list that name nothing at all, before anything is excluded."""
    if isinstance(config.target_modules, str):
        return []
    return sorted(
        entry
        for entry in config.target_modules or ()
        if not any(name == entry or name.endswith(f".{entry}") for name in names)
    )


def _near(entry: str, available: list[str]) -> str:
    near = difflib.get_close_matches(entry, available, n=3)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return f"{hint}the model has {', '.join(available)}"
