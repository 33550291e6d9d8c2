"""Which architectures are exact when cut: those in ``proven.json``, each held to one process.

A style that is exact on one model need not be on another, whose own code reads a cut tensor as if
it were whole. So an architecture is cut only when a tiny model of it, with an adapter on everything
that can have one, gave what plain PEFT gives in one process: loss, every gradient, three AdamW
steps, the saved adapter read back, the merged model. ``tests/zoo`` does this for each entry, and
``python -m tests.zoo.table`` writes the file from such a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["Architecture", "architecture_problem", "proven_architectures", "proven_classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model type of transformers and what was proven of it."""

    model_type: str
    precision: str
    """"float64": equal to 1e-9; "float32": the router stays in float32, equal to 1e-5."""
    experts: str | None
    """"cut" or "whole" on every rank; None without expert weights."""
    head: str
    """"cut" or "whole" on every rank."""
    not_adapted: tuple[str, ...]
    """Layers that an adapter cannot have in one process either, because peft refuses them."""
    packs: bool
    """Whether rows that are joined into one sequence stay apart in every layer."""
    tp_sizes: tuple[int, ...]


def proven_architectures() -> tuple[Architecture, ...]:
    """Every architecture that is exact, by name."""
    return tuple(
        Architecture(
            model_type=model_type,
            precision=row["precision"],
            experts=row["experts"],
            head=row["head"],
            not_adapted=tuple(row["not_adapted"]),
            packs=row["packs"],
            tp_sizes=tuple(row["tp_sizes"]),
        )
        for model_type, row in sorted(_document()["architectures"].items())
    )


def proven_classes() -> dict[str, tuple[str, ...]]:
    """Model types with a text model beside towers, and the types of text model they may hold."""
    return {name: tuple(texts) for name, texts in sorted(_document()["classes"].items())}


def architecture_problem(model_type: str, text_type: str) -> str | None:
    """Why models of this type are not cut, or None.

    Args:
        model_type: The model's own.
        text_type: That of its text model; the same where it is nothing else.
    """
    if model_type == text_type:
        is_proven = model_type in _document()["architectures"]
        return None if is_proven else f"{model_type} has not been proven exact when cut"
    if text_type in proven_classes().get(model_type, ()):
        return None
    return f"{model_type} with a {text_type} inside has not been proven exact when cut"


@cache
def _document() -> dict[str, Any]:
    text = resources.files("tplora.plan").joinpath("proven.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
