"""A mistake in a recipe, in one line: where, what was found, what is needed, what to do."""

import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal

from tplora.recipe.toml import dump_value

__all__ = ["ALSO_CALLED", "Places", "did_you_mean", "say_problem", "say_type"]

Places = Mapping[tuple[str, ...], str]

ALSO_CALLED = {
    "rank": "r",
    "lora_r": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "evaluation_strategy": "eval_strategy",
    "grad_accum": "gradient_accumulation_steps",
    "torch_dtype": "dtype",
    "name": "pretrained_model_name_or_path",
    "model_name_or_path": "pretrained_model_name_or_path",
    "tensor_parallel_size": "tp_size",
    "train_file": "train",
    "validation": "eval",
    "test": "eval",
}
"""What people call a key elsewhere."""

_SECRETS = ("token", "hub_token")  # refused, and not to be seen in a terminal or a log
_WORDS: dict[Any, str] = {
    str: "text in quotes",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def say_problem(
    path: Sequence[str],
    message: str,
    *,
    places: Places,
    value: object = None,
    index: int | None = None,
) -> str:
    """``lora.r = 0 (line 12): message``; without a value, or a place, those parts are left out."""
    head = ".".join(path) + (f"[{index}]" if index is not None else "")
    if value is not None and path[-1] not in _SECRETS:
        head += f" = {_show(value)}"
    place = next((places[key] for key in _prefixes(path) if key in places), None)
    return f"{head} ({place}): {message}" if place else f"{head}: {message}"


def did_you_mean(name: str, known: Iterable[str], *, limit: int = 3) -> list[str]:
    """The known names nearest to ``name``; what a key is called elsewhere counts too."""
    names = {key: key for key in known}
    spoken = names | {other: key for other, key in ALSO_CALLED.items() if key in names}
    near = difflib.get_close_matches(name.lower(), spoken, n=2 * limit, cutoff=0.6)
    return list(dict.fromkeys(spoken[match] for match in near))[:limit]


def say_type(hint: object) -> str:
    """What a value has to be, in words: ``a whole number of 1 or more, or "auto"``."""
    options = list(dict.fromkeys(_options(hint)))
    if all(option.startswith('"') for option in options) and len(options) > 2:
        return f"one of {', '.join(options)}"
    return ", or ".join([", ".join(options[:-1]), options[-1]]) if len(options) > 1 else options[0]


def _options(hint: object) -> Iterable[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        # An enum beside str: the enum says which strings.
        named = any(isinstance(arg, type) and issubclass(arg, Enum) for arg in inner)
        for arg in inner:
            if arg is not type(None) and not (named and arg is str):
                yield from _options(arg)
    elif origin is Literal:
        yield from (dump_value(value) for value in inner)
    elif origin is typing.Annotated:
        yield _say_annotated(*inner)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (f'"{member.value}"' for member in hint)
    elif origin is list:
        yield f"a list of {say_type(inner[0])}"
    else:
        yield _WORDS.get(origin or hint, "a table")


def _say_annotated(hint: object, *marks: Any) -> str:
    if typing.get_origin(hint) is list:  # the one limit of a list is that it is not empty
        return f"a list of one or more, each {say_type(typing.get_args(hint)[0])}"
    return f"{say_type(hint)}{_say_limits(marks)}"


def _say_limits(marks: Iterable[Any]) -> str:
    said = ""
    for mark in (part for outer in marks for part in getattr(outer, "metadata", [outer])):
        if getattr(mark, "ge", None) is not None:
            said += f" of {mark.ge} or more"
        if getattr(mark, "min_length", None) is not None:
            said += " that is not empty"
        if getattr(mark, "pattern", None) == "^[0-9a-f]{64}$":
            said += ", 64 hex digits in lower case"
    return said


def _prefixes(path: Sequence[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(path[:end]) for end in range(len(path), 0, -1))


def _show(value: object, *, limit: int = 80) -> str:
    shown = dump_value(value)
    return shown if len(shown) <= limit else f"{shown[: limit - 4]} ..."
