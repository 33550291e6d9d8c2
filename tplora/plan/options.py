"""What a ``LoraConfig`` asks of one layer beside A and B, and where it cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.upstream import matches_pattern

if TYPE_CHECKING:
    from collections.abc import Collection

    from peft import LoraConfig

    from tplora.plan.style import Extra, Kind

__all__ = ["find_option_problems", "option_problem", "wanted_extras"]

_LINEAR_ONLY = ("lora_bias", "use_bdlora", "alora_invocation_tokens", "kasa_config")
_MODULES_ONLY = ("use_dora", *_LINEAR_ONLY)
# Kinds of LoRA whose product with B is not a plain linear's.
_OWN_PRODUCT = ("use_bdlora", "alora_invocation_tokens", "kasa_config")
_MISSING = {
    "embedding": (_LINEAR_ONLY, "an embedding"),
    "parameter": (_MODULES_ONLY, "adapted inside its module's forward"),
}


def wanted_extras(config: LoraConfig) -> tuple[Extra, ...]:
    """What is trained beside A and B on a layer that ``option_problem`` has nothing against."""
    wanted: list[Extra] = []
    if config.use_dora:
        wanted.append("magnitude")
    if config.lora_bias:
        wanted.append("bias")
    if config.kasa_config:
        wanted.append("diagonal")
    return tuple(wanted)


def option_problem(config: LoraConfig, kind: Kind, name: str, *, is_head: bool) -> str | None:
    """Why the options of ``config`` cannot be had on this layer, or None."""
    fields, what = _MISSING.get(kind, ((), ""))
    for field in fields:
        if getattr(config, field):
            return f"lora.{field}: {name} is {what}, where peft does not have it; do not target it"
    if is_head and config.alora_invocation_tokens:
        return (
            f"lora.alora_invocation_tokens: {name} is the head, whose logits are computed for the "
            "trained tokens alone, without their places in a row; do not target it"
        )
    return None


def find_option_problems(
    config: LoraConfig, names: Collection[str], *, vocab_size: int
) -> list[str]:
    """Options that would be ignored, beside others or on what is adapted.

    Args:
        config: The config.
        names: Everything that is adapted, by full name.
        vocab_size: Tokens that the model has.
    """
    problems = [
        f"lora.lora_bias: {field} is given as well, and its B has no such bias; leave one out"
        for field in _OWN_PRODUCT
        if config.lora_bias and getattr(config, field)
    ]
    known = {spelled for name in names for spelled in (name, f"{name}.weight")}
    for field in ("rank_pattern", "alpha_pattern"):
        problems += [
            f"lora.{field}: {pattern!r} matches nothing that is adapted; mend it or leave it out"
            for pattern in getattr(config, field)
            if not any(matches_pattern(pattern, name) for name in known)
        ]
    wrong = [t for t in config.alora_invocation_tokens or () if not 0 <= t < vocab_size]
    if wrong:
        problems.append(
            f"lora.alora_invocation_tokens: the model has no token {wrong[0]}, only 0 to "
            f"{vocab_size - 1}; name those that the tokenizer makes of the invocation"
        )
    return problems
