"""Modules that are called otherwise in another class or version of the same model.

language_model.model.layers.0.mlp.up_proj       saved from a model with towers, before
model.language_model.layers.0.mlp.up_proj       the same today
model.layers.0.mlp.up_proj                      its text part alone
"""

from collections.abc import Collection

__all__ = ["moved_names"]

_ROOT = "base_model.model."


def moved_names(held: Collection[str], wanted: Collection[str]) -> dict[str, str] | None:
    """By each name that is wanted, the one of ``held`` that differs in what it begins with.

    Returns:
        None, if no beginning, put in the place of one other, turns all of ``held`` into all of
        ``wanted``, or if several do.
    """
    if not held or len(held) != len(wanted):
        return None
    first = min(held).split(".")
    pairs = set()
    for name in wanted:
        parts = name.split(".")
        common = 0
        while common < min(len(parts), len(first)) and parts[-1 - common] == first[-1 - common]:
            common += 1
        pairs.add((_joined(first[: len(first) - common]), _joined(parts[: len(parts) - common])))
    found = [table for pair in pairs if (table := _table(held, *pair)).keys() == set(wanted)]
    return found[0] if len(found) == 1 else None


def _joined(parts: list[str]) -> str:
    return "".join(f"{part}." for part in parts)


def _table(held: Collection[str], old: str, new: str) -> dict[str, str]:
    if not (old + ".").startswith(_ROOT) or not (new + ".").startswith(_ROOT):
        return {}
    return {new + name.removeprefix(old): name for name in held if name.startswith(old)}
