"""What ``[train]`` may ask of rows that are joined: ``packing``, ``padding_free`` and their keys.

A micro-batch of joined rows is one sequence without padding. What keeps each row to itself is its
positions, which begin at 0 again; ``plan.packing`` says of which models that is true.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, say_problem

__all__ = ["find_packing_problems", "joins_rows"]

_STRATEGIES: Mapping[str, str] = {
    "bfd_split": (
        "cuts a row that is too long into rows of their own, each learned without what came before "
        "it, so that what is counted and shown are no rows of the data"
    ),
    "wrapped": "cuts rows anywhere, and has each row read those before it",
}


def joins_rows(train: Mapping[str, Any]) -> bool:
    """Whether the rows of a micro-batch are one sequence."""
    return bool(train.get("packing") or train.get("padding_free"))


def find_packing_problems(method: str, train: Mapping[str, Any], places: Places) -> Iterator[str]:
    """Every rule broken by keys whose names and types are right."""
    for key, message in _problems(method, train):
        yield say_problem(["train", key], message, places=places, value=train.get(key))


def _problems(method: str, train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if method != "sft":
        if train.get("padding_free"):
            yield "padding_free", 'trl has it for method = "sft" alone at present; leave it out'
        return
    strategy = train.get("packing_strategy", "bfd")
    if strategy != "bfd":
        reason = _STRATEGIES.get(strategy)
        yield "packing_strategy", f'{reason}; use "bfd"' if reason else 'needs "bfd"'
    for key in ("packing_strategy", "eval_packing"):
        if train.get(key) is not None and not train.get("packing"):
            yield key, "has no effect without packing = true; give both, or leave it out"
    if joins_rows(train) and train.get("pad_to_multiple_of"):
        yield "pad_to_multiple_of", "pads, and joined rows have no padding; leave one of them out"
