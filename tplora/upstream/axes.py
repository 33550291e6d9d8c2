"""Private names of transformers: the meshes of a loaded model, and replicas of it.

Read in transformers 5.24: distributed/utils.py and distributed/mixin.py.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import DistributedConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel

    from tplora.plan.axes import Axes

__all__ = ["data_group", "make_replicas", "placed_on_axes"]

_NAMES = ("pp", "dp_replicate", "fsdp", "tp")


@contextlib.contextmanager
def placed_on_axes(axes: Axes) -> Iterator[None]:
    """While open, a model loads over tp groups of a world that has replicas of it as well.

    ``DistributedConfig(dp_replicate_size=R)`` would manage every weight by FSDP, and gather it in
    each forward from itself alone. A replica of a frozen base has nothing to say to another one:
    the loader gets a mesh with the replicas' axis (``initialize_distributed_mesh``, which refuses
    a world that is not the config's product), and is not told of them.
    """
    if axes.dp_replicate_size == 1:
        yield
        return
    from transformers.distributed import mixin

    before = mixin.initialize_distributed_mesh

    def initialize(_config: Any) -> tuple[torch.device, Any]:
        manager = _mesh_manager(axes)
        device_type = manager.get_mesh("tp").device_type
        device = torch.device(device_type)
        if device_type != "cpu":  # bound when this process joined its group
            device = torch.device(device_type, torch.accelerator.current_device_index())
        return device, manager

    mixin.initialize_distributed_mesh = initialize
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = before


def _mesh_manager(axes: Axes) -> Any:
    """``TransformersDeviceMesh`` over the whole world, tp innermost. Collective."""
    from transformers.distributed.utils import TransformersDeviceMesh, _ensure_torch_distributed

    device_type = torch._C._get_accelerator().type
    _ensure_torch_distributed(device_type)
    shape = (1, axes.dp_replicate_size, axes.fsdp_size, axes.tp_size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=_NAMES)
    return TransformersDeviceMesh(mesh, mesh)


def make_replicas(model: PreTrainedModel, axes: Axes) -> None:
    """Say of a loaded model that it is one of replicas. Collective where it was loaded whole.

    Trainer (transformers 5.24) then neither wraps it in DDP nor moves it, and tells accelerate of
    as many data ranks as there are.
    """
    replica: Any = model
    if getattr(replica, "_mesh_manager", None) is None:
        manager = _mesh_manager(axes)
        replica._mesh_manager = manager
        replica._device_mesh = manager.get_mesh(("pp", "fsdp", "tp"))
        replica._is_distributed_loading_by_transformers = True
        replica._tp_size, replica._fsdp_size = axes.tp_size, axes.fsdp_size
        replica.config.distributed_config = DistributedConfig(tp_size=axes.tp_size)
    replica.config.distributed_config.dp_replicate_size = axes.dp_replicate_size


def data_group(model: PreTrainedModel) -> ProcessGroup | None:
    """The ranks that hold the same piece of the model and get other rows; None if there are none.

    ``model._mesh_manager`` (transformers 5.24). Collective the first time.
    """
    manager = getattr(model, "_mesh_manager", None)
    if manager is None:
        return None
    sizes = {name: manager.get_mesh(name).size() for name in ("dp_replicate", "fsdp")}
    names = [name for name, size in sizes.items() if size > 1]
    if not names:
        return None
    if len(names) == 1:
        group: ProcessGroup = manager.get_mesh(names[0]).get_group()
        return group
    held: Any = model
    if not hasattr(held, "_tplora_data_mesh"):
        held._tplora_data_mesh = manager.get_mesh(tuple(names))._flatten("tplora_data")
    both: ProcessGroup = held._tplora_data_mesh.get_group()
    return both
