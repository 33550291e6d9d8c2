"""Plain values to TOML text; the standard library only reads it.

One level of tables, anything deeper inline: that is what a recipe looks like.
"""

import re
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any

__all__ = ["dump_toml", "dump_value"]

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def dump_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write ``[table]`` by ``[table]``; ``tomllib`` reads back the same values."""
    blocks = []
    for name, table in tables.items():
        lines = [f"{_key(key)} = {dump_value(value)}" for key, value in table.items()]
        blocks.append("\n".join([f"[{_key(name)}]", *lines]) + "\n")
    return "\n".join(blocks)


def dump_value(value: object) -> str:
    """One value on one line.

    Raises:
        TypeError: If TOML has no such value, None among them.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{"".join(_escape(char) for char in value)}"'
    if isinstance(value, int | float):
        return repr(value)  # inf and nan are spelled alike in both languages
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(dump_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(key)} = {dump_value(item)}" for key, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    raise TypeError(f"{value!r}: TOML has no {type(value).__name__}")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else dump_value(key)


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    # Control characters are not allowed as they are; everything else is.
    return f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char
