"""What ``[train]`` may ask of DPO and KTO: their losses, and what a loss asks of other keys."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tplora.recipe.wording import Places, say_problem

__all__ = ["LOSS_TYPES", "OF_BATCH", "REFUSED_PREFERENCE_KEYS", "find_preference_problems"]

_PRECOMPUTED = (
    "keeps each row's reference as the ranks gather it, in which a tp group counts once per rank; "
    "leave it out: the reference is computed beside each step"
)
_SYNCED = "trl has it for models without an adapter alone; leave it out"

REFUSED_PREFERENCE_KEYS: Mapping[str, str] = {
    "precompute_ref_log_probs": _PRECOMPUTED,
    "precompute_ref_batch_size": _PRECOMPUTED,
    "sync_ref_model": _SYNCED,
    "ref_model_mixup_alpha": _SYNCED,
    "ref_model_sync_steps": _SYNCED,
}

LOSS_TYPES: Mapping[str, tuple[str, ...]] = {
    "dpo": (
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
        "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
    ),
    "kto": ("kto", "apo_zero_unpaired"),
}  # fmt: skip
"""By method; the first is the usual one."""

_OF_DIFFERENCE = (
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft",
)  # fmt: skip
_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
OF_BATCH: Mapping[str, str] = {
    "aot": "sorts the pairs of a whole batch",
    "aot_unpaired": "sorts the pairs of a whole batch",
    "sft": "is a mean over the tokens of a whole batch",
    "kto": "pairs each prompt with another row of the whole batch",
}
"""Losses that cannot be shared out over data axes, where a rank sees its part of a batch."""


def find_preference_problems(
    method: str, train: Mapping[str, Any], places: Places, *, data_size: int
) -> Iterator[str]:
    """Every rule broken by keys whose names and types are right.

    Args:
        method: "dpo" or "kto"; others have no such rules.
        train: The keys.
        places: Where they stand.
        data_size: Data ranks there will be.
    """
    if method not in LOSS_TYPES:
        return
    asked = _loss_types(method, train)
    for key, message in (
        *_loss_problems(method, asked, train, data_size),
        *(_dpo_problems(asked, train) if method == "dpo" else _kto_problems(asked, train)),
    ):
        yield say_problem(["train", key], message, places=places, value=train.get(key))


def _loss_types(method: str, train: Mapping[str, Any]) -> Sequence[str]:
    asked = train.get("loss_type", LOSS_TYPES[method][0])
    return [asked] if isinstance(asked, str) else asked


def _loss_problems(
    method: str, asked: Sequence[str], train: Mapping[str, Any], data_size: int
) -> Iterator[tuple[str, str]]:
    unknown = [name for name in asked if name not in LOSS_TYPES[method]]
    if unknown or not asked:
        yield "loss_type", f"needs one of {', '.join(LOSS_TYPES[method])}"
    for name in asked if data_size > 1 else ():
        if name in OF_BATCH:
            yield (
                "loss_type",
                f'"{name}" {OF_BATCH[name]}, of which each of {data_size} data ranks sees a part; '
                "set parallel.fsdp_size and parallel.dp_replicate_size to 1, or take another loss",
            )
    if train.get("beta", 1) <= 0:
        yield "beta", "needs to be more than 0"


def _dpo_problems(asked: Sequence[str], train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    weights, smoothing = train.get("loss_weights"), train.get("label_smoothing", 0.0)
    if weights is not None and len(weights) != len(asked):
        yield "loss_weights", f"needs one number for each loss_type, {len(asked)}"
    if not 0 <= smoothing < 0.5:
        yield "label_smoothing", "needs a number from 0 up to, but not, 0.5"
    if "exo_pair" in asked and smoothing == 0:
        yield "label_smoothing", 'loss_type "exo_pair" needs it above 0, such as 1e-3'
    if train.get("use_weighting") and {"aot", "aot_unpaired"} & set(asked):
        yield "use_weighting", "has no meaning where pairs are sorted; take another loss_type"
    if not 0 <= (train.get("ld_alpha") or 0) <= 1:
        yield "ld_alpha", "needs a number from 0 to 1"
    yield from _divergence_problems(asked, train)


def _divergence_problems(
    asked: Sequence[str], train: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    divergence = train.get("f_divergence_type", _DIVERGENCES[0])
    if divergence not in _DIVERGENCES:
        yield "f_divergence_type", f"needs one of {', '.join(_DIVERGENCES)}"
    elif divergence != _DIVERGENCES[0] and not set(asked) <= set(_OF_DIFFERENCE):
        yield "f_divergence_type", f"needs a loss_type of {', '.join(_OF_DIFFERENCE)}"


def _kto_problems(asked: Sequence[str], train: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "kto" not in asked:
        return
    if train.get("train_sampling_strategy", "sequential") != "sequential":
        yield (
            "train_sampling_strategy",
            'loss_type "kto" needs "sequential": its pairs are made of neighbours',
        )
    if train.get("per_device_train_batch_size", 8) < 2:
        yield (
            "per_device_train_batch_size",
            'loss_type "kto" needs 2 or more: its pairs are made of the rows of a batch',
        )
