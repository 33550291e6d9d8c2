"""What ``[lora]`` may ask for: what of ``LoraConfig`` is exact under tensor parallelism."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tplora.recipe.lora_fields import (
    BESIDE_AN_ADAPTER,
    INITS,
    INITS_IN_PYTHON,
    LORA_FIELDS,
    OWN_KEYS,
    REFUSED_INITS,
    LoraField,
)
from tplora.recipe.pattern_rules import (
    MATCHED,
    is_number_above_0,
    is_whole_from_1,
    say_pattern,
)
from tplora.recipe.wording import Places, say_problem

__all__ = ["SUPPORTED", "find_lora_problems", "is_refused", "say_method", "say_value"]

SUPPORTED = (
    *(name for name, field in LORA_FIELDS.items() if field.state == "exact"),
    *OWN_KEYS,
)
"""What a recipe may set."""

_EXACT = LoraField(state="exact")
_OTHER_METHOD = 'only "LORA" is trained; leave peft_type out'
_LIKE = {
    "IA3 VERA LOHA LOKR OFT BOFT HRA FOURIERFT VBLORA RANDLORA SHIRA C3A ROAD MISS": (
        "changes weights by another rule than B A; choose a small lora.r for few parameters"
    ),
    "ADALORA": "changes r while it trains; set lora.r or lora.rank_pattern",
    "PROMPT_TUNING P_TUNING PREFIX_TUNING MULTITASK_PROMPT_TUNING CPT CARTRIDGE": (
        "trains virtual tokens; LoRA on the attention is the nearest"
    ),
    "LN_TUNING TRAINABLE_TOKENS BEFT": (
        "is a part of LoRA's config: lora.modules_to_save for norms, lora.trainable_token_indices "
        "for tokens, lora.bias for biases"
    ),
    "XLORA POLY": "mixes adapters; combine them with model.add_weighted_adapter",
}


def is_refused(key: str) -> bool:
    """Whether a field is refused whatever it is set to, but for its default."""
    return LORA_FIELDS.get(key, _EXACT).state == "refused"


def say_method(peft_type: object) -> str:
    """Why another of PEFT's methods is not trained, and the nearest that is."""
    name = str(getattr(peft_type, "value", peft_type)).upper()
    why = next((why for names, why in _LIKE.items() if name in names.split()), None)
    return _OTHER_METHOD if why is None else f"{name} {why}; {_OTHER_METHOD}"


def find_lora_problems(
    lora: Mapping[str, Any],
    defaults: Mapping[str, Any],
    places: Places,
    *,
    given: Mapping[str, Any],
) -> Iterator[str]:
    """Every rule broken by the keys of right name and type; ``given`` has the others too."""
    for key, value in lora.items():
        message = (
            _say_record(key, value, defaults)
            or say_value(key, value, defaults)
            or _say_in_python(key, value)
        )
        if message:
            yield say_problem(["lora", key], message, places=places, value=value)
    if "adapter_name_or_path" in lora:
        yield from _start_problems(lora, places)
        return
    if not {"target_modules", "target_parameters", "experts"} & set(given):
        need = 'missing; name modules, or "all-linear" for every linear layer but the head'
        yield say_problem(["lora", "target_modules"], need, places=places)
    if lora.get("lora_dropout") and (lora.get("experts") or lora.get("target_parameters")):
        need = "needs to be 0 where parameters such as experts are adapted; peft has none there"
        yield say_problem(["lora", "lora_dropout"], need, places=places, value=lora["lora_dropout"])
    yield from _list_problems(lora, places)


def _say_record(key: str, value: object, defaults: Mapping[str, Any]) -> str | None:
    """Fields that say what an adapter is: they are written by the run, not by a recipe."""
    if LORA_FIELDS.get(key, _EXACT).state != "record" or value == defaults[key]:
        return None
    if key == "peft_type":
        return say_method(value)
    return "says what an adapter is, which the run writes itself; leave it out"


def say_value(key: str, value: object, defaults: Mapping[str, Any]) -> str | None:
    """What is wrong with one field of ``LoraConfig``, or None."""
    field = LORA_FIELDS.get(key, _EXACT)
    if field.state == "refused":
        return None if value == defaults[key] else field.note
    if field.only and value not in field.only:
        allowed = ", ".join(_spell(one) for one in field.only)
        return f"cannot be done exactly under tensor parallelism yet; allowed is {allowed}"
    if key == "init_lora_weights":
        return _say_init(value)
    if key in MATCHED:
        return say_pattern(key, value)
    return _say_number(key, value)


def _say_number(key: str, value: object) -> str | None:
    if key == "r" and not is_whole_from_1(value):
        return "needs a whole number of 1 or more"
    if (key == "lora_alpha" or key.startswith("loraplus_")) and not is_number_above_0(value):
        return "needs a number above 0"
    if key == "lora_dropout" and isinstance(value, int | float) and not 0 <= value < 1:
        return "needs a number from 0 up to, but not, 1"
    return None


def _say_in_python(key: str, value: object) -> str | None:
    if key == "task_type" and value == "SEQ_CLS":
        return (
            "needs a model with a score head, which a recipe does not load; attach from Python to "
            'one of AutoModelForSequenceClassification, or use "CAUSAL_LM"'
        )
    init = value if key == "init_lora_weights" else key.removesuffix("_config")
    why = INITS_IN_PYTHON.get(str(init))
    return why and f'{why}; attach from Python, or use init_lora_weights = "pissa"'


def _say_init(value: object) -> str | None:
    if value in INITS or re.fullmatch(r"pissa_niter_[1-9]\d*", str(value)):
        return None
    if str(value) in REFUSED_INITS:
        return REFUSED_INITS[str(value)]
    allowed = ", ".join(_spell(one) for one in INITS)
    return f'is no init of peft; allowed is {allowed}, "pissa_niter_N"'


def _start_problems(lora: Mapping[str, Any], places: Places) -> Iterator[str]:
    """An adapter to start from brings its own config."""
    folder = Path(lora["adapter_name_or_path"])
    if folder.is_absolute() and not folder.is_dir():  # what is not may be a hub id
        need = "no such folder; name one that holds adapter_config.json, or a run's"
        yield say_problem(["lora", "adapter_name_or_path"], need, places=places, value=str(folder))
    for key in lora.keys() - set(BESIDE_AN_ADAPTER):
        need = "comes with the adapter that is started from; leave it out"
        yield say_problem(["lora", key], need, places=places, value=lora[key])


def _list_problems(lora: Mapping[str, Any], places: Places) -> Iterator[str]:
    if lora.get("target_modules") == []:
        yield say_problem(
            ["lora", "target_modules"], "adapts nothing; name a module", places=places, value=[]
        )


def _spell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
