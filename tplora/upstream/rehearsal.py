"""Private names of torch and transformers that let one process run a step without any storage."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tplora.upstream.models import auto_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "attention_without_storage",
    "build_cut_meta_model",
    "end_of_step",
    "ranks_without_peers",
]

_FLASH = 1
"""``SDPBackend.flash_attention``."""


@contextlib.contextmanager
def ranks_without_peers(num_ranks: int) -> Iterator[None]:
    """While open, this process is rank 0 of a group whose collectives send nothing.

    Joining a group replaces ``sys.excepthook`` by one that prints a rank; it is put back.

    The backend "fake" of ``torch.testing._internal.distributed.fake_pg`` (torch 2.11 to 2.14).
    """
    if num_ranks == 1:
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def build_cut_meta_model(
    config: PretrainedConfig,
    *,
    tp_size: int,
    dtype: torch.dtype,
    styles: Mapping[str, str],
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model of ``config`` on the meta device, cut as ``from_pretrained`` cuts it.

    ``prepare_distribute_model`` and ``maybe_distribute_model`` (transformers 5.24,
    distributed/mixin.py) are what ``from_pretrained`` calls before it reads a weight, in the
    contexts of ``initialization.py``: tied weights are cut one by one, and tied afterwards.
    """
    from transformers import DistributedConfig, PreTrainedModel
    from transformers.initialization import meta_device_safe_creation_ops, no_tie_weights

    with no_tie_weights(), torch.device("meta"), meta_device_safe_creation_ops():
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    if tp_size > 1:
        asked = DistributedConfig(tp_size=tp_size, tp_plan=dict(styles) or None)
        asked, _, mesh = PreTrainedModel.prepare_distribute_model(asked)
        model = model.maybe_distribute_model(model, asked, mesh)
    model.tie_weights()
    return model


@contextlib.contextmanager
def attention_without_storage() -> Iterator[None]:
    """While open, attention on meta tensors takes the kernel that it takes on a CPU.

    On meta tensors torch computes attention by its formula, ``[heads, T, T]`` and all.
    ``torch._fused_sdp_choice`` and ``_scaled_dot_product_flash_attention_for_cpu`` (torch 2.11 to
    2.14). Flash kernels of GPUs keep the same: the output and one number a row.
    """
    before = F.scaled_dot_product_attention

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        settings: Any = {"scale": scale, "enable_gqa": enable_gqa}
        given = (query, key, value, attn_mask)
        small = [None if one is None else _stand_in(one) for one in given]
        choose: Any = torch._fused_sdp_choice
        choice = choose(*small, dropout_p, is_causal, **settings)
        if not query.is_meta or choice != _FLASH:
            return before(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, query.new_zeros(()), query.new_zeros(()))
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: torch.Tensor = flash(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return out

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def _stand_in(like: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same shape and dtype that takes the bytes of one row."""
    row = torch.empty(like.shape[-1], dtype=like.dtype)
    return row.expand(like.shape).requires_grad_(like.requires_grad)


@contextlib.contextmanager
def end_of_step(*, is_last: bool) -> Iterator[None]:
    """While open, a backward pass is the last of its step, or is not.

    ``GradientState._set_sync_gradients`` (accelerate 1.15), which ``accumulate`` calls.
    """
    from accelerate.state import GradientState

    state = GradientState()
    before = state.sync_gradients
    state._set_sync_gradients(is_last)
    try:
        yield
    finally:
        state._set_sync_gradients(before)
