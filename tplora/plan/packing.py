"""Of which models joined rows stay apart: those whose row in ``proven.json`` says so.

A joined row begins at position 0 again. What keeps it from reading the rows before it is each
layer's own code: attention by a mask that is made from the positions, and nothing at all in a layer
that carries a state from token to token. So a model is given joined rows only where every row of a
pack was shown to give what it gives alone, by each of the attentions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.plan.architectures import proven_architectures

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PretrainedConfig

__all__ = ["PROVEN_ATTENTION", "joined_rows_problem"]

PROVEN_ATTENTION = ("eager", "sdpa")
"""What was compared; of these a model takes one where nothing is asked for."""


def joined_rows_problem(
    config: PretrainedConfig, lora: LoraConfig, attn_implementation: str | None
) -> str | None:
    """Why rows cannot be joined for this model, or None.

    Args:
        config: The model's.
        lora: The adapter's.
        attn_implementation: As in ``from_pretrained``; None is transformers' choice.
    """
    text_type = config.get_text_config(decoder=True).model_type
    if config.model_type != text_type:
        return f"{config.model_type}: has more than a text model, of which nothing was shown"
    row = next((one for one in proven_architectures() if one.model_type == text_type), None)
    if row is None or not row.packs:
        return f"{text_type}: its layers have not been shown to keep joined rows apart"
    if attn_implementation not in (None, *PROVEN_ATTENTION):
        return (
            f'model.attn_implementation = "{attn_implementation}" has not been shown to keep '
            f"joined rows apart; use {' or '.join(PROVEN_ATTENTION)}"
        )
    if lora.alora_invocation_tokens:
        return "aLoRA looks for where it is invoked once in a sequence, not in each joined row"
    return None
