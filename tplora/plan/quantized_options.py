"""What of a ``LoraConfig`` cannot be had on a quantised base, because plain PEFT has it otherwise.

PEFT's layers on bitsandbytes' linears (tuners/lora/bnb.py, peft 0.21) know DoRA and aLoRA alone of
the other kinds of LoRA, and its inits take a packed weight for numbers or refuse it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig

    from tplora.plan.quantization import QuantizationPlan

__all__ = ["find_adapter_config_problems"]

_BUILDS_PLAIN = "peft builds plain LoRA of it on a quantised layer"
_READS_NUMBERS = "peft computes it from weights in 16 or 32 bits alone"
_ROUNDS_THE_REST = (
    "peft rounds what it leaves of a weight anew, and no saved adapter is for the base that was "
    "loaded then"
)
_INSTEAD = 'use true, "gaussian" or, in 4 bits, lora.loftq = true, or an unquantised base'
_INITS_THAT_LEAVE_THE_BASE = (True, False, "gaussian", "orthogonal")


def find_adapter_config_problems(plan: QuantizationPlan, lora: LoraConfig) -> list[str]:
    """What of an adapter would be something else, or nothing, on a base quantised by ``plan``."""
    return [
        f"lora.{name} = {getattr(lora, name)!r}: where the base is in {plan.method}, {reason}"
        for name, reason in _problems(plan, lora)
    ]


def _problems(plan: QuantizationPlan, lora: LoraConfig) -> Iterator[tuple[str, str]]:
    for name in ("use_bdlora", "kasa_config"):
        if getattr(lora, name):
            yield name, f"{_BUILDS_PLAIN}; leave it out, or [quantization]"
    if lora.alora_invocation_tokens and plan.method == "int8":
        yield (
            "alora_invocation_tokens",
            "peft writes into an 8-bit layer's product, which torch does not let it; use "
            "load_in_4bit",
        )
    init = lora.init_lora_weights
    if init == "orthogonal" and (plan.method == "int8" or "int" in plan.storage):
        yield "init_lora_weights", f"peft rounds it to the packed weights' dtype; {_INSTEAD}"
    elif init == "olora":
        yield "init_lora_weights", f"{_ROUNDS_THE_REST}; {_INSTEAD}"
    elif init not in _INITS_THAT_LEAVE_THE_BASE:
        yield "init_lora_weights", f"{_READS_NUMBERS}; {_INSTEAD}"
