"""What ``[train]`` may say about activation checkpointing."""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, did_you_mean, say_problem

__all__ = ["find_checkpointing_problems"]

_OLD_NAMES = ("gradient_checkpointing", "gradient_checkpointing_kwargs")
_KINDS: Mapping[str, type] = {
    "use_reentrant": bool,
    "every_n_layers": int,
    "offload": bool,
    "keep_reduced_outputs": bool,
}
"""Keywords that a recipe may give, the last of them ours."""

_FOR_DEBUGGING = "is for looking for mistakes in checkpointing itself; leave it out"
_REFUSED: Mapping[str, str] = {
    "selective": (
        "keeps what attention gives, by a method of the model that trl replaces and that is not "
        "called there; leave it out"
    ),
    "preserve_rng_state": (
        "without it a layer that is computed again would draw other dropout masks; leave it out"
    ),
    "early_stop": "without it sums that nobody asks for would be taken again; leave it out",
    "determinism_check": _FOR_DEBUGGING,
    "debug": _FOR_DEBUGGING,
    "context_fn": "is a function; of what a layer may keep there is keep_reduced_outputs",
}


def find_checkpointing_problems(train: Mapping[str, Any], places: Places) -> Iterator[str]:
    """A key under both of its names, and keywords that are unknown, refused or of no effect."""
    for old in _OLD_NAMES:
        new = old.replace("gradient", "activation")
        if old in train and new in train:
            message = f"is the old name of {new}, which is set too; keep {new}"
            yield say_problem(["train", old], message, places=places, value=train[old])
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        path, given = ["train", f"{name}_kwargs"], train.get(f"{name}_kwargs")
        if given and train.get(name) is False:
            message = f"has no effect while {name} is false; leave one of them out"
            yield say_problem(path, message, places=places)
        elif isinstance(given, Mapping):
            yield from _keyword_problems(given, path, places)
        elif given:
            yield say_problem(path, "needs a table", places=places, value=given)


def _keyword_problems(given: Mapping[str, Any], path: list[str], places: Places) -> Iterator[str]:
    for key, value in given.items():
        message = _say_keyword(key, value)
        if message:
            yield say_problem([*path, key], message, places=places, value=value)
    if given.get("keep_reduced_outputs") is True and given.get("use_reentrant") is True:
        message = (
            "keeps nothing but a layer's input, so that keep_reduced_outputs would have no effect; "
            "leave one of them out"
        )
        yield say_problem([*path, "use_reentrant"], message, places=places, value=True)


def _say_keyword(key: str, value: object) -> str | None:
    if key in _REFUSED:
        return _REFUSED[key]
    if key not in _KINDS:
        near = did_you_mean(key, _KINDS)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_KINDS)}"
        return f"unknown keyword; {hint}"
    if type(value) is not _KINDS[key]:
        return f"needs {'a whole number' if _KINDS[key] is int else 'true or false'}"
    return "needs 1 or more" if _KINDS[key] is int and int(str(value)) < 1 else None
