"""Ways to train: each has a trainer of trl's, whose config says what else ``[train]`` may hold."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tplora.recipe.wording import Places, did_you_mean, say_problem

__all__ = ["DEFAULT_METHOD", "METHODS", "Method", "find_method_problems", "method_of"]

DEFAULT_METHOD = "sft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train."""

    config: str
    """The class of trl whose fields ``[train]`` takes."""
    rows: str
    """What each row has to hold."""


METHODS: Mapping[str, Method] = {
    "sft": Method(config="SFTConfig", rows="messages, or prompt and completion, or text"),
    "dpo": Method(config="DPOConfig", rows="prompt, chosen and rejected"),
    "kto": Method(config="KTOConfig", rows="prompt, completion and label"),
}
"""What a recipe may name."""

_GENERATES = (
    "generates rows while it trains, and rewards them by a model or a function that a recipe does "
    "not load; make the rows beforehand, and train on them with"
)
_TEACHES = "learns from a teacher's logits, a second model that a recipe does not load; use"
_UNSTABLE = (
    "is in trl.experimental, whose code may change with every release, so that nothing said of it "
    "would stay true; use"
)
_REFUSED: Mapping[str, str] = {
    "reward": (
        "trains a score head, which a recipe does not load; attach from Python to one of "
        "AutoModelForSequenceClassification and give it to trl's RewardTrainer, or use"
    ),
    **dict.fromkeys(
        ("grpo", "rloo", "ppo", "online_dpo", "xpo", "nash_md", "gmpo", "a2po", "async_grpo"),
        _GENERATES,
    ),
    **dict.fromkeys(("distillation", "gkd", "gold", "minillm", "sdft", "sdpo", "iw_opd"), _TEACHES),
    "orpo": (
        "is in trl.experimental, whose code may change with every release, and reads whole logits "
        "of both answers on every rank; give a tplora model to its ORPOTrainer from Python, or use"
    ),
    **dict.fromkeys(("cpo", "simpo", "tpo", "bco", "prm"), _UNSTABLE),
}


def method_of(train: Mapping[str, Any]) -> str:
    """The method that ``[train]`` names; the usual one where it names none that there is."""
    asked = train.get("method", DEFAULT_METHOD)
    return asked if asked in METHODS else DEFAULT_METHOD


def find_method_problems(
    train: Mapping[str, Any], data: Mapping[str, Any], places: Places
) -> Iterator[str]:
    """What is wrong with the method, and with what ``[data]`` says that it does not do."""
    asked, known = train.get("method", DEFAULT_METHOD), ", ".join(f'"{name}"' for name in METHODS)
    if asked not in METHODS:
        why = _REFUSED.get(asked.lower().replace("-", "_")) if isinstance(asked, str) else None
        near = did_you_mean(str(asked), METHODS)
        hint = f'; did you mean "{near[0]}"?' if near else ""
        message = f"{why} one of {known}" if why else f"needs one of {known}{hint}"
        yield say_problem(["train", "method"], message, places=places, value=asked)
    elif asked != DEFAULT_METHOD and data.get("assistant_only_loss"):
        message = (
            f'is of method = "sft"; with "{asked}" the whole completion counts, and nothing of the '
            "prompt; leave it out"
        )
        yield say_problem(["data", "assistant_only_loss"], message, places=places, value=True)
