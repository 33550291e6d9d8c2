"""accelerate's ``ParallelismConfig``, built from how the model is cut; CPU included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate import ParallelismConfig

from tplora.upstream import CpuParallelismConfig, tp_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tplora.adapter.model import TploraModel

__all__ = ["parallelism_config"]


def parallelism_config(model: PreTrainedModel | TploraModel) -> ParallelismConfig | None:
    """What ``TrainingArguments(parallelism_config=...)`` needs for this model.

    With it the trainer hands every rank of a tp group the same batch and counts tokens once.

    Returns:
        None for a model that is not cut, since accelerate needs no config then.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = tp_mesh(base)
    if mesh is None:
        return None
    config_class = CpuParallelismConfig if mesh.device_type == "cpu" else ParallelismConfig
    return config_class(tp_size=mesh.size())
