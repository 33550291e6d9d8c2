"""A saved adapter on its base, in tplora's own layers, at any tp_size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.artifact.adapter_dir import read_adapter
from tplora.base.load import load_base
from tplora.base.resize import resize_tokens

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tplora.adapter.model import TploraModel
    from tplora.run.base import Base

__all__ = ["load_adapted"]


def load_adapted(adapter: Path, base: Base, *, tp_size: int, device: torch.device) -> TploraModel:
    """Load base and adapter, in eval mode. Collective where ``tp_size`` is more than one.

    Args:
        adapter: The adapter's folder.
        base: What it belongs to.
        tp_size: Ranks that the model is cut over; any, whatever it was trained with.
        device: Of this rank.
    """
    model = load_base(
        base.path,
        tp_size=tp_size,
        device=device,
        dtype=base.dtype,
        revision=base.revision,
        **base.options,
    )
    saved = read_adapter(adapter)
    if saved.num_tokens > model.get_input_embeddings().weight.shape[0]:
        resize_tokens(model, saved.num_tokens, seed=0)  # the adapter has the new rows
    adapted = attach_adapter(model, saved.config)
    load_factors(adapted, adapter)
    adapted.eval()
    return adapted
