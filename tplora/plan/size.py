"""Bytes as people write and read them: "80GiB", "24 GB", "1.5 GiB"."""

from __future__ import annotations

import re

from tplora.errors import PlanError

__all__ = ["format_size", "parse_size"]

_UNITS = {
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{letter: 1024**power for power, letter in enumerate("KMGT", start=1)},
    "B": 1,
}


def parse_size(text: str, *, where: str) -> int:
    """Bytes of a size with its unit; a bare letter is binary, as in ``free -h``.

    Raises:
        PlanError: If it is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    factor = _UNITS.get(found[2].upper()) if found else None
    if found is None or factor is None or not float(found[1]):
        raise PlanError([f"{where} = {text!r}: is no size; write it as 80GiB, 24GB or 500MiB"])
    return int(float(found[1]) * factor)


def format_size(num_bytes: float) -> str:
    """Bytes for a person: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
