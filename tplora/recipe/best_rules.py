"""What the best checkpoint asks of the other keys: a metric there is, saved when it is known."""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, did_you_mean, say_problem

__all__ = ["METRICS", "find_best_problems"]

_PAIRS = (
    "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
    "logits/chosen", "logits/rejected",
)  # fmt: skip
METRICS: Mapping[str, tuple[str, ...]] = {
    "sft": ("loss", "mean_token_accuracy", "entropy"),
    "dpo": ("loss", "rewards/accuracies", "mean_token_accuracy", "entropy", *_PAIRS),
    "kto": ("loss", "kl", "entropy", *_PAIRS),
}
"""What an evaluation of each method says."""


def find_best_problems(method: str, train: Mapping[str, Any], places: Places) -> Iterator[str]:
    """Every rule broken by keys whose names and types are right."""
    for key, message in (*_metric_problems(method, train), *_time_problems(train)):
        yield say_problem(["train", key], message, places=places, value=train.get(key))


def _metric_problems(method: str, train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    metric = train.get("metric_for_best_model")
    if metric is None:
        return
    if metric.removeprefix("eval_") not in METRICS[method]:
        near = did_you_mean(metric, METRICS[method])
        hint = f"did you mean {', '.join(near)}? " if near else ""
        yield "metric_for_best_model", f"{hint}needs one of {', '.join(METRICS[method])}"
    if not _is_judged(train):
        yield (
            "metric_for_best_model",
            "is read for load_best_model_at_end, early_stopping_patience and save_strategy = "
            '"best" alone; set one of them, or leave it out',
        )


def _is_judged(train: Mapping[str, Any]) -> bool:
    return (
        train.get("save_strategy") == "best"
        or bool(train.get("load_best_model_at_end"))
        or "early_stopping_patience" in train
        or train.get("lr_scheduler_type") == "reduce_lr_on_plateau"
    )


def _time_problems(train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    saves, evaluates = train.get("save_strategy", "no"), train.get("eval_strategy", "epoch")
    if "early_stopping_threshold" in train and "early_stopping_patience" not in train:
        yield "early_stopping_threshold", "has no effect without early_stopping_patience; give both"
    if saves == "best" and train.get("metric_for_best_model") is None:
        yield "save_strategy", 'needs metric_for_best_model beside it, such as "loss"'
    if not train.get("load_best_model_at_end"):
        return
    if saves == "no":
        yield (
            "load_best_model_at_end",
            "needs checkpoints to choose from; set save_strategy to what eval_strategy is, or to "
            '"best"',
        )
    elif saves != "best" and saves != evaluates:
        yield (
            "load_best_model_at_end",
            f'needs checkpoints of what was evaluated: save_strategy is "{saves}", eval_strategy '
            f'"{evaluates}"; set both alike, or save_strategy = "best"',
        )
    elif saves == "steps" and not _is_multiple(train):
        yield "save_steps", "needs to be a multiple of eval_steps, so that the best one is saved"


def _is_multiple(train: Mapping[str, Any]) -> bool:
    saves, evaluates = train.get("save_steps", 500), train.get("eval_steps")
    evaluates = train.get("logging_steps", 10) if evaluates is None else evaluates
    if (saves < 1) != (evaluates < 1):
        return False
    scale = 1_000_000  # fractions of a run are compared as whole numbers, as transformers does
    return bool(round(saves * scale) % round(evaluates * scale) == 0)
