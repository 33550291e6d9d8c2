"""What ``[lora]`` may ask for: what of ``LoraConfig`` is exact under tensor parallelism."""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, say_problem

__all__ = ["SUPPORTED", "find_lora_problems", "say_value"]

SUPPORTED = (
    "r", "lora_alpha", "target_modules", "target_parameters", "exclude_modules", "lora_dropout",
    "bias", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "task_type", "experts",
)  # fmt: skip

_ONLY: Mapping[str, tuple[object, ...]] = {
    "bias": ("none",),
    "task_type": ("CAUSAL_LM",),
    "init_lora_weights": (True, False, "gaussian"),
}
_NOT_EXACT = (
    "is a LoraConfig field that tplora cannot do exactly under tensor parallelism yet; leave it out"
)


def find_lora_problems(
    lora: Mapping[str, Any],
    defaults: Mapping[str, Any],
    places: Places,
    *,
    given: Mapping[str, Any],
) -> Iterator[str]:
    """Every rule broken by the keys of right name and type; ``given`` has the others too."""
    for key, value in lora.items():
        message = say_value(key, value, defaults)
        if message:
            yield say_problem(["lora", key], message, places=places, value=value)
    if not {"target_modules", "target_parameters", "experts"} & set(given):
        need = 'missing; name modules, or "all-linear" for every linear layer but the head'
        yield say_problem(["lora", "target_modules"], need, places=places)
    if lora.get("lora_dropout") and (lora.get("experts") or lora.get("target_parameters")):
        need = "needs to be 0 where parameters such as experts are adapted; peft has none there"
        yield say_problem(["lora", "lora_dropout"], need, places=places, value=lora["lora_dropout"])
    yield from _list_problems(lora, places)


def say_value(key: str, value: object, defaults: Mapping[str, Any]) -> str | None:
    """What is wrong with one field of ``LoraConfig``, or None."""
    if key not in SUPPORTED:
        return None if value == defaults[key] else _NOT_EXACT
    if key in _ONLY and value not in _ONLY[key]:
        allowed = ", ".join(_spell(one) for one in _ONLY[key])
        return f"cannot be done exactly under tensor parallelism yet; allowed is {allowed}"
    if isinstance(value, dict):
        return _say_pattern(value)
    if key in ("r", "lora_alpha") and isinstance(value, int) and value < 1:
        return "needs a whole number of 1 or more"
    if key == "lora_dropout" and isinstance(value, int | float) and not 0 <= value < 1:
        return "needs a number from 0 up to, but not, 1"
    return None


def _say_pattern(pattern: Mapping[str, Any]) -> str | None:
    numbers = [value for value in pattern.values() if isinstance(value, int)]
    if len(numbers) < len(pattern) or any(isinstance(n, bool) or n < 1 for n in numbers):
        return "needs a table of module patterns, each with a whole number of 1 or more"
    return None


def _list_problems(lora: Mapping[str, Any], places: Places) -> Iterator[str]:
    if lora.get("target_modules") == []:
        yield say_problem(
            ["lora", "target_modules"], "adapts nothing; name a module", places=places, value=[]
        )


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
