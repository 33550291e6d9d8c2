"""What ``[quantization]`` may ask for: what of ``BitsAndBytesConfig`` is exact when cut."""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, say_problem

__all__ = [
    "REFUSED_QUANTIZATION",
    "find_autocast_problems",
    "find_loftq_problems",
    "find_quantization_problems",
]

_LOADS = ("load_in_4bit", "load_in_8bit")

REFUSED_QUANTIZATION: Mapping[str, str] = {
    "llm_int8_threshold": "the input of a layer keeps its dtype here, so that it has no outliers "
    "to hold apart; leave it out",
    "llm_int8_has_fp16_weight": "it holds 16-bit weights, and the base is not trained; leave it "
    "out",
    "llm_int8_enable_fp32_cpu_offload": "every rank holds its pieces on its device; leave it out",
    "quant_method": "it is bitsandbytes; set load_in_4bit or load_in_8bit",
    "bnb_4bit_blocksize": "bitsandbytes' linear layers have blocks of 64; leave it out",
}
"""Keys that bitsandbytes or people know, each with its reason."""


def find_quantization_problems(table: Mapping[str, Any], places: Places) -> Iterator[str]:
    """Every rule between the keys of a table that is there."""
    asked = [key for key in _LOADS if table.get(key) is True]
    if len(asked) == 2:
        message = "load_in_4bit is set too; keep one of them"
        yield say_problem(["quantization", "load_in_8bit"], message, places=places, value=True)
    if not asked:
        message = "asks for nothing; set load_in_4bit = true or load_in_8bit = true"
        yield say_problem(["quantization"], message, places=places)
    if asked == ["load_in_8bit"]:
        for key in table:
            if key.startswith("bnb_4bit_"):
                message = "has no effect in 8 bits; leave it out, or set load_in_4bit = true"
                value = table[key]
                yield say_problem(["quantization", key], message, places=places, value=value)


def find_autocast_problems(
    train: Mapping[str, Any], table: Mapping[str, Any], places: Places
) -> Iterator[str]:
    """A quantised layer multiplies in a dtype of its own."""
    if train.get("bf16") is True and table:
        message = (
            "is autocast, and a quantised layer multiplies in its own dtype; set "
            'quantization.bnb_4bit_compute_dtype = "bfloat16", and leave this out'
        )
        yield say_problem(["train", "bf16"], message, places=places, value=True)


def find_loftq_problems(
    lora: Mapping[str, Any], table: Mapping[str, Any], places: Places
) -> Iterator[str]:
    """LoftQ's factors are of what 4 bits lose, and take the place of any others."""
    if lora.get("loftq") is not True:
        return
    where = ["lora", "loftq"]
    if table.get("load_in_4bit") is not True:
        need = "is of what 4 bits lose of a base; set [quantization] load_in_4bit = true"
        yield say_problem(where, need, places=places, value=True)
    if lora.get("init_lora_weights", True) is not True:
        need = "its factors take the place of init_lora_weights; leave one out"
        yield say_problem(where, need, places=places, value=True)
