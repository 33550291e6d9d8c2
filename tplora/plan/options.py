"""What a ``LoraConfig`` asks of one layer beside A and B, and where it cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peft import LoraConfig

    from tplora.plan.style import Extra, Kind

__all__ = ["option_problem", "wanted_extras"]

_LINEAR_ONLY = ("lora_bias", "use_bdlora", "alora_invocation_tokens", "kasa_config")
_MODULES_ONLY = ("use_dora", *_LINEAR_ONLY)
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
