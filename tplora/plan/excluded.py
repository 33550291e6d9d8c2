"""``exclude_modules``: each entry has to leave something out, or the run is not what was asked for.

PEFT holds an entry to the names of modules one by one: ``vision_tower`` names the tower, which no
adapter sits on, and none of the layers inside it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts

__all__ = ["excluded_problems", "is_from_a_file"]


def excluded_problems(config: LoraConfig, facts: ModelFacts) -> Iterator[str]:
    """Every entry that leaves nothing out, with what it names and what to write instead.

    What a finished adapter's file says is of no consequence any more, and passes.
    """
    given = config.exclude_modules
    if not given or is_from_a_file(config):
        return
    held = {part.name: part for part in facts.parts if part.name}
    if isinstance(given, str):
        if not any(re.fullmatch(given, name) for name in held):
            yield f"lora.exclude_modules = {given!r}: matches no module's whole name; {_say(held)}"
        return
    for entry in sorted(given):
        matched = [name for name in held if f".{name}".endswith(f".{entry}")]
        if not matched:
            yield f"lora.exclude_modules: {entry!r} matches no module; {_say(held)}"
        elif not any(held[name].parameters for name in matched):
            yield (
                f"lora.exclude_modules: {entry!r} names {matched[0]}, which holds layers and is "
                "none, and peft leaves none of them out; write a regular expression, as "
                rf"'.*\.?{re.escape(entry)}\..*'"
            )


def is_from_a_file(config: LoraConfig) -> bool:
    """Whether a config is that of a saved adapter, which names its base."""
    return bool(config.base_model_name_or_path)


def _say(held: Iterable[str]) -> str:
    leaves = sorted({name.rpartition(".")[2] for name in held} - set(map(str, range(1000))))
    return f"the model has {', '.join(leaves[:24])}" + (", ..." if len(leaves) > 24 else "")
