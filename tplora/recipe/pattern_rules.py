"""What ``[lora]`` says of modules by pattern: whether PEFT can read it at all."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MATCHED", "is_number_above_0", "is_whole_from_1", "say_pattern"]

MATCHED = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Fields that PEFT holds against the names of modules."""

_ALL_LINEAR = "all-linear"


def say_pattern(key: str, value: object) -> str | None:
    """What PEFT could not read in one field of ``MATCHED``, or None."""
    if key == "target_modules" and _means_all_linear(value):
        return f'did you mean target_modules = "{_ALL_LINEAR}"? it stands alone, not in a list'
    for pattern, text in _expressions(key, value):
        try:
            re.compile(text)
        except (re.error, OverflowError) as error:
            return (
                f"{pattern!r} is no regular expression ({getattr(error, 'msg', error)}); "
                "put a backslash before a character that is meant as it stands"
            )
    if isinstance(value, dict):
        return _say_numbers(key, value)
    return None


def is_whole_from_1(value: object) -> bool:
    """Whether a rank can be this."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_number_above_0(value: object) -> bool:
    """Whether an alpha can be this; an adapter of twice the rank has sqrt(2) times it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf  # type: ignore[operator]


def _means_all_linear(value: object) -> bool:
    """Whether the shorthand is misspelt, or in a list: both would be the name of a module."""
    entries = value if isinstance(value, list | tuple | set) else [value]
    near = [one for one in entries if re.sub(r"[-_ ]", "", str(one)).lower() == "alllinear"]
    return bool(near) and not (isinstance(value, str) and value.lower() == _ALL_LINEAR)


def _expressions(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Each pattern as written and as PEFT compiles it; the entries of a list of names are none.

    ``get_pattern_key`` and ``check_target_module_exists`` (peft 0.21).
    """
    if key.endswith("_modules"):
        yield from [(value, value)] if isinstance(value, str) else []
    elif isinstance(value, dict):
        yield from ((str(one), rf"(.*\.)?({one})$") for one in value)
    elif key == "layers_pattern":
        entries = value if isinstance(value, list | tuple) else [value] if value else []
        yield from ((str(one), rf"(?:^|.*?\.){one}\.(\d+)\.") for one in entries)


def _say_numbers(key: str, table: dict[str, object]) -> str | None:
    is_right = is_whole_from_1 if key == "rank_pattern" else is_number_above_0
    if all(is_right(value) for value in table.values()):
        return None
    need = "a whole number of 1 or more" if key == "rank_pattern" else "a number above 0"
    return f"needs a table of module patterns, each with {need}"
