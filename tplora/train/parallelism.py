"""accelerate's ``ParallelismConfig``, built from how the model is cut; CPU included.

accelerate knows no replicas of a model that is cut, and reads its sizes before Trainer sets them:
the data axes of whatever kind are its ``dp_shard``, which decides who gets which rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from accelerate import ParallelismConfig

from tplora.upstream import CpuParallelismConfig, tp_mesh
from tplora.upstream.axes import data_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tplora.adapter.model import TploraModel

__all__ = ["parallelism_config"]


def parallelism_config(model: PreTrainedModel | TploraModel) -> ParallelismConfig | None:
    """What ``TrainingArguments(parallelism_config=...)`` needs for this model.

    With it the trainer hands every rank of a tp group the same batch, every tp group another one,
    and counts tokens once. Collective where there are data axes.

    Returns:
        None for a model of one process, since accelerate needs no config then.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    mesh = tp_mesh(base)
    if mesh is None:
        return None
    config_class = CpuParallelismConfig if mesh.device_type == "cpu" else ParallelismConfig
    group = data_group(base)
    data_size = 1 if group is None else dist.get_world_size(group)
    return config_class(tp_size=mesh.size(), dp_shard_size=data_size)
