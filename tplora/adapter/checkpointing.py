"""Activation checkpointing of a cut model, in transformers' words and one of ours.

    activation_checkpointing_kwargs = {"keep_reduced_outputs": True}

has each decoder layer keep the sums that it takes over ranks; see ``kept_sums.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tplora.collectives.kept_sums import KeepsSumsOfOthers, is_keeping_sums, keep_sums
from tplora.errors import PlanError
from tplora.upstream.recomputing import has_forward_of_style

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedModel

__all__ = ["KEEP_REDUCED_OUTPUTS", "enable_checkpointing"]

KEEP_REDUCED_OUTPUTS = "keep_reduced_outputs"
"""Our key among those that transformers gives to ``torch.utils.checkpoint.checkpoint``."""


def enable_checkpointing(
    base: PreTrainedModel, asked: Mapping[str, Any] | None, **settings: Any
) -> None:
    """``base.activation_checkpointing_enable`` with our key among the keywords.

    Args:
        base: The model inside PEFT's.
        asked: ``activation_checkpointing_kwargs``.
        settings: transformers' other arguments, ``every_n_layers`` and ``offload``.

    Raises:
        PlanError: If sums are to be kept where reentrant checkpointing would not ask for them, or
            outputs of attention by trl's own method.
    """
    given = dict(asked or {})
    if given.get("selective"):
        raise PlanError(
            [
                "activation_checkpointing_kwargs: selective, a method of the model that trl "
                "replaces and that is not called there; leave it out"
            ]
        )
    if given.pop(KEEP_REDUCED_OUTPUTS, False):
        if given.get("use_reentrant"):
            raise PlanError(
                [
                    f"activation_checkpointing_kwargs: {KEEP_REDUCED_OUTPUTS} with use_reentrant = "
                    "true, with which torch keeps nothing but a layer's input; leave use_reentrant "
                    "out"
                ]
            )
        _keep_sums_of_styles(base)
        given |= {"use_reentrant": False, "context_fn": keep_sums}
    base.activation_checkpointing_enable(given or None, **settings)


def _keep_sums_of_styles(base: PreTrainedModel) -> None:
    """Linears without an adapter, and experts: their sums are taken by transformers' styles."""
    for module in base.modules():
        if has_forward_of_style(module):
            vars(module)["forward"] = _keeping(module.forward)


def _keeping(forward: Callable[..., Any]) -> Callable[..., Any]:
    def keeping(*args: Any, **kwargs: Any) -> Any:
        if not is_keeping_sums():
            return forward(*args, **kwargs)
        with KeepsSumsOfOthers():  # type: ignore[no-untyped-call]
            return forward(*args, **kwargs)

    return keeping
