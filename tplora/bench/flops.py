"""Operations of a training step that a model needs, whatever the code that computes it repeats.

    of a token  =  4 W + 6 F + 12 L a d s / 2      (a multiplication and an addition are two)

    W   frozen weights that it is multiplied by: forward, and backward to the input
    F   trained factors: these two, and the factor's own gradient
    L a d s   layers, attention heads, their size, the row's length: scores and values, forward and
        twice in backward, half of it behind the diagonal

A pass that nothing is learned from, such as that of a reference, is of the forward part alone:

    of a token  =  2 W + 2 F + 4 L a d s / 2

Of a stack of experts a token is multiplied by those that its router chooses.

Source: Chowdhery et al. 2022, appendix B, with the gradients left out that LoRA does not compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from tplora.plan.build import Plan

__all__ = ["step_flops"]

_CHOSEN = ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts")


def step_flops(
    plan: Plan, config: PretrainedConfig, *, num_tokens: float, length: float, num_passes: int = 0
) -> float:
    """Operations of a step over all ranks.

    Args:
        plan: Of model and adapter.
        config: The model's own.
        num_tokens: Tokens of the step.
        length: Tokens of a row, on average.
        num_passes: Passes over the same tokens beside the one that is learned from.
    """
    text = config.get_text_config(decoder=True)
    frozen = sum(
        parameter.numel * (_share_of_experts(text) if parameter.role == "experts" else 1)
        for parameter in plan.facts.parameters
        if parameter.role in ("linear", "head", "router", "experts")
    )
    if plan.facts.is_tied:  # the embedding is multiplied by as the head
        frozen += plan.facts.vocab_size * plan.facts.hidden_size
    heads = getattr(text, "num_attention_heads", 0)
    size = getattr(text, "head_dim", None) or plan.facts.hidden_size // max(1, heads)
    scores: float = 2 * text.num_hidden_layers * heads * size * length
    learned = 4 * frozen + 6 * plan.num_trainable + 3 * scores
    looked_at = 2 * frozen + 2 * plan.num_trainable + scores
    return float(num_tokens) * (learned + num_passes * looked_at)


def _share_of_experts(text: PretrainedConfig) -> float:
    """Which part of an expert's stack a token meets; all of it where that is not said."""
    chosen = next((getattr(text, key) for key in _CHOSEN if getattr(text, key, None)), None)
    total = next(
        (
            getattr(text, key)
            for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
            if getattr(text, key, None)
        ),
        None,
    )
    return min(1.0, float(chosen) / float(total)) if chosen and total else 1.0
