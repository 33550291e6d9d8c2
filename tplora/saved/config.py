"""An ``adapter_config.json`` of any tool and version of PEFT, or what of it cannot be used.

Fields that are missing have PEFT's defaults, as in PEFT. A field that the installed PEFT has not is
refused if it is set: it changes what the adapter computes in a way that nothing here knows of.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from tplora.errors import ArtifactError
from tplora.recipe.lora_fields import INITS, REFUSED_INITS
from tplora.recipe.lora_rules import say_method
from tplora.recipe.pattern_rules import MATCHED, is_number_above_0, is_whole_from_1, say_pattern
from tplora.saved.files import find_file, read_json, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from peft import LoraConfig

__all__ = ["CONFIG", "MAX_R", "read_saved_config"]

CONFIG = "adapter_config.json"

MAX_R = 1 << 17
"""No weight has more rows and columns than this, so no delta weight more rank."""

# Of PEFT before 0.3: whether eval() merges.
_WITHOUT_EFFECT = {"merge_weights"}
# Names of modules that PEFT would import, and what belongs to them.
_IMPORTING = ("megatron_config",)

_MAX_NAMES, _MAX_NAME = 1 << 20, 2000


def read_saved_config(folder: Path) -> LoraConfig:
    """PEFT's config of an adapter's folder; nothing that it names is looked up or imported.

    Raises:
        ArtifactError: If there is none, or a field is missing, unknown or impossible.
    """
    path = folder / CONFIG
    if not folder.is_dir() or find_file(folder, [CONFIG]) is None:
        raise ArtifactError(f"{folder}: holds no {CONFIG}; name the folder of a PEFT adapter")
    values = read_json(path)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        found = values.get("peft_type") if isinstance(values, dict) else values
        raise ArtifactError(f"{path}: its peft_type is {_short(found)}; {say_method(found)}")
    problems = list(_problems(values))
    if problems:
        raise ArtifactError(f"{path}: {'; '.join(problems[:4])}")
    return _build(path, values)


def _build(path: Path, values: dict[str, Any]) -> LoraConfig:
    from peft import LoraConfig  # noqa: PLC0415  (slow; a recipe without an adapter needs none)

    fields = LoraConfig.__dataclass_fields__
    unknown = [
        name
        for name, value in values.items()
        if name not in fields and name not in _WITHOUT_EFFECT and value
    ]
    if unknown:
        raise ArtifactError(
            f"{path}: {shown(', '.join(sorted(unknown)))} not known to the installed peft; install "
            f"the peft that wrote it ({_short(values.get('peft_version'))}), or set it to null if "
            "it changes nothing of what the adapter computes"
        )
    given = {name: value for name, value in values.items() if name in fields and value is not None}
    try:
        config = LoraConfig(**given)
    except Exception as error:  # PEFT checks its fields in many ways
        said = shown(str(error).strip().partition("\n")[0])
        raise ArtifactError(f"{path}: peft refuses it ({said}); save it again") from None
    return config


def _problems(values: dict[str, Any]) -> Iterator[str]:
    """What no config of PEFT can hold, whatever else it holds."""
    for name, (is_right, need) in _RULES.items():
        value = values.get(name)
        if value is not None and not is_right(value):
            yield f"{name} = {_short(value)}, {need} is needed"
    for name in MATCHED:
        value = values.get(name)
        if value is not None and name in _RULES and _RULES[name][0](value):
            said = say_pattern(name, value)
            if said:
                yield f"{name}: {shown(said)}"
    for name in _IMPORTING:
        if values.get(name):
            yield f"{name} is set, which makes peft import what it names; set it to null"


def _short(value: object) -> str:
    return shown(repr(value))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= _MAX_NAME


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(_is_name, value))


def _is_name_or_names(value: object) -> bool:
    return _is_name(value) or _is_names(value)


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _is_indices(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_NAMES and all(map(_is_index, value))


def _is_tokens(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_name(name) and _is_indices(found) for name, found in value.items())
    return _is_indices(value)


def _is_r(value: object) -> bool:
    return is_whole_from_1(value) and isinstance(value, int) and value <= MAX_R


def _is_table_of(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda table: (
        isinstance(table, dict)
        and len(table) <= _MAX_NAMES
        and all(_is_name(name) and is_right(value) for name, value in table.items())
    )


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _is_alpha(value: object) -> bool:
    return is_number_above_0(value) and isinstance(value, int | float) and value < math.sqrt(1e38)


def _is_init(value: object) -> bool:
    known = value in (*INITS, *REFUSED_INITS)
    return known or re.fullmatch(r"pissa_niter_[1-9]\d{0,8}", str(value)) is not None


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and len(value) <= _MAX_NAMES


def _is_ranges(value: object) -> bool:
    return isinstance(value, list) and all(_is_indices(pair) and len(pair) == 2 for pair in value)


_TABLES = (
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
    "monteclora_config", "runtime_config", "use_bdlora", "arrow_config", "kasa_config",
    "megatron_config", "auto_mapping",
)  # fmt: skip
_NAMES = "a list of names"
_SWITCH = (_is_switch, "true or false")
_NAME_OR_NAMES = (_is_name_or_names, "a name or a list of names")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_r, f"a whole number from 1 to {MAX_R}"),
    "lora_alpha": (_is_alpha, "a number above 0"),
    "lora_dropout": (_is_share, "a number from 0 up to, but not, 1"),
    "rank_pattern": (_is_table_of(_is_r), f"a table of ranks from 1 to {MAX_R}"),
    "alpha_pattern": (_is_table_of(_is_alpha), "a table of numbers above 0"),
    "target_modules": _NAME_OR_NAMES,
    "exclude_modules": _NAME_OR_NAMES,
    "layers_pattern": _NAME_OR_NAMES,
    "target_parameters": (_is_names, _NAMES),
    "modules_to_save": (_is_names, _NAMES),
    "layers_to_transform": (lambda one: _is_index(one) or _is_indices(one), "a list of layers"),
    "trainable_token_indices": (_is_tokens, "a list of token ids, or a table of them"),
    "alora_invocation_tokens": (_is_indices, "a list of token ids"),
    "bias": (lambda one: one in ("none", "all", "lora_only"), '"none", "all" or "lora_only"'),
    "init_lora_weights": (_is_init, "an init of peft"),
    "base_model_name_or_path": (_is_name, "a name without control characters"),
    "revision": (_is_name, "a name without control characters"),
    "task_type": (_is_name, "a task of peft"),
    "peft_version": (_is_name, "a version"),
    "megatron_core": (_is_name, "a name"),
    "qalora_group_size": (is_whole_from_1, "a whole number"),
    "layer_replication": (_is_ranges, "a list of pairs of layers"),
    **dict.fromkeys(_TABLES, (_is_table, "a table")),
    **dict.fromkeys(
        ("use_rslora", "use_dora", "fan_in_fan_out", "use_qalora", "lora_bias", "inference_mode",
         "ensure_weight_tying"),
        _SWITCH,
    ),
}  # fmt: skip
