"""Where each key of a TOML text stands, which ``tomllib`` does not say.

A statement is the fewest lines that are valid TOML by themselves: a header, or a key with its whole
value. So ``tomllib`` finds the ends of arrays and of multi-line strings for us.
"""

import tomllib
from collections.abc import Iterator
from typing import Any

__all__ = ["find_lines"]


def find_lines(text: str) -> dict[tuple[str, ...], int]:
    """Map every key path of a valid TOML ``text`` to the line, from 1, its statement starts on."""
    found: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    for line, statement, value in _statements(text):
        is_header = statement.lstrip().startswith("[")
        prefix = () if is_header else header
        paths = [prefix + path for path in _paths(value)]
        for path in paths:
            found.setdefault(path, line)
        if is_header:
            header = paths[-1]
    return found


def _statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    buffer, start = "", 1
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        buffer += line
        try:
            value = tomllib.loads(buffer)
        except tomllib.TOMLDecodeError:
            continue  # an array or a string goes on in the next line
        if value:
            yield start, buffer, value
        buffer, start = "", number + 1


def _paths(value: object) -> Iterator[tuple[str, ...]]:
    """Every key path inside ``value``, outer before inner."""
    if isinstance(value, list):
        value = value[-1] if value and isinstance(value[-1], dict) else None  # [[tables]]
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (key,)
            for path in _paths(inner):
                yield (key, *path)
