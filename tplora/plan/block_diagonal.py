"""BD-LoRA under a plan: the factor that is block-diagonal is cut along its blocks.

    A block-diagonal, W cut on in      rank k's blocks read rank k's input: A cut on r, B on r
    B block-diagonal, W cut on out     rank k's blocks make rank k's output: A cut on r, B on out
    anything else                      the usual placement; the product is linear in each factor

# I in_features   O out_features   R LoRA rank r   N nblocks   P tp_size

PEFT stores a block-diagonal A as ``[R, I/N]`` and B as ``[O, R/N]``: the blocks below each other.
Aligned like this, neither factor is replicated and no gradient is partial.

Source: PEFT's ``use_bdlora`` (peft 0.21, tuners/lora/variants.py, ``BlockDiagonalLinear``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tplora.plan.style import FactorPlan

if TYPE_CHECKING:
    from peft.tuners.lora.config import BdLoraConfig

    from tplora.plan.layer import LayerPlan

__all__ = ["block_problem", "plan_blocks"]


def _diagonal_factor(config: BdLoraConfig, name: str) -> str | None:
    """A or B, by PEFT's rule: one of its patterns occurs in the module's name."""
    for factor, patterns in (("A", config.target_modules_bd_a), ("B", config.target_modules_bd_b)):
        if any(pattern in name for pattern in patterns or ()):
            return factor
    return None


def block_problem(config: BdLoraConfig, layer: LayerPlan, tp_size: int) -> str | None:
    """Why BD-LoRA cannot be had on this layer, or None."""
    where = f"lora.use_bdlora: {layer.name}"
    matches = [
        factor
        for factor, patterns in (
            ("A", config.target_modules_bd_a),
            ("B", config.target_modules_bd_b),
        )
        if any(pattern in layer.name for pattern in patterns or ())
    ]
    if len(matches) > 1:
        return f"{where} matches target_modules_bd_a and target_modules_bd_b; leave one out"
    if not matches:
        return (
            f"{where} matches neither target_modules_bd_a nor target_modules_bd_b; name it in one "
            "of them, or set match_strict = false"
            if config.match_strict
            else None
        )
    sizes = {"A": ("in", layer.a.shape[1]), "B": ("out", layer.b.shape[0])}
    side, size = sizes[matches[0]]
    if size % config.nblocks or layer.r % config.nblocks:
        return (
            f"{where} has {size} {side}put features and r = {layer.r}, which nblocks = "
            f"{config.nblocks} does not divide; choose an nblocks that divides both"
        )
    if _is_aligned(matches[0], layer) and config.nblocks % tp_size:
        return (
            f"{where}: nblocks = {config.nblocks} over tp_size {tp_size} would cut a block; use an "
            f"nblocks that {tp_size} divides"
        )
    return None


def _is_aligned(factor: str, layer: LayerPlan) -> bool:
    return layer.weight.shard_dim == {"A": 1, "B": 0}[factor]


def plan_blocks(config: BdLoraConfig, layer: LayerPlan) -> LayerPlan:
    """``layer`` with the shapes and cuts of block-diagonal factors."""
    factor = _diagonal_factor(config, layer.name)
    if factor is None:
        return layer
    a, b, n = layer.a, layer.b, config.nblocks
    a_shape = (a.shape[0], a.shape[1] // n) if factor == "A" else a.shape
    b_shape = b.shape if factor == "A" else (b.shape[0], b.shape[1] // n)
    if not _is_aligned(factor, layer):
        return replace(layer, a=replace(a, shape=a_shape), b=replace(b, shape=b_shape))
    b_dim = 1 if factor == "A" else 0
    return replace(
        layer,
        a=FactorPlan(shape=a_shape, shard_dim=0, is_grad_partial=False),
        b=FactorPlan(shape=b_shape, shard_dim=b_dim, is_grad_partial=False),
    )
