"""Give a loaded base more tokens, as ``resize_token_embeddings`` does in one process.

    pieces --gathered--> whole weight --transformers--> more rows --cut anew--> pieces

Source: transformers 5.24, ``PreTrainedModel.resize_token_embeddings``, which draws new rows around
the mean of the old ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tplora.errors import ShardError
from tplora.upstream.fsdp import is_sharded_over_data

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

__all__ = ["resize_tokens"]


def resize_tokens(model: PreTrainedModel, num_tokens: int, *, seed: int) -> None:
    """Make embedding and head ``num_tokens`` rows long; new rows are drawn from ``seed``.

    Collective: every rank calls it. Two all-gathers at most, of the embedding and of a head that is
    not tied to it; a broadcast of both. Each rank holds both whole for as long as this takes.

    Args:
        model: A frozen base, cut or not.
        num_tokens: As many rows as the model has, or more.
        seed: The same on every rank; the rows are those of one process that has called
            ``torch.manual_seed(seed)``.

    Raises:
        ShardError: If the model has more tokens already, or its head is of another kind.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if is_sharded_over_data(model):
        raise ShardError(
            "model.add_tokens: the base is sharded over data ranks; use parallel.dp_replicate_size "
            "in place of fsdp_size"
        )
    has_rows = embedding.weight.shape[0]
    if num_tokens < has_rows:
        raise ShardError(
            f"model.add_tokens: the model has {has_rows} tokens, {num_tokens} are asked for; a "
            "vocabulary is never made smaller"
        )
    modules = [embedding] if head is None or head.weight is embedding.weight else [embedding, head]
    cuts = [_gather(module) for module in modules]
    is_tied = head is not None and len(modules) == 1
    if is_tied:
        head.weight = embedding.weight
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.resize_token_embeddings(num_tokens)
    if head is not None:
        _keep_head(model, head)
    for module, cut in zip(modules, cuts, strict=True):
        for name, placed in cut.items():
            _cut(module, name, placed)
    if is_tied:
        head.weight = embedding.weight
    model.requires_grad_(requires_grad=False)


def _keep_head(model: PreTrainedModel, head: nn.Module) -> None:
    """transformers makes a new head; the old one has the style's forward, and stays."""
    new = model.get_output_embeddings()
    if new is head:
        return
    for name, parameter in new.named_parameters(recurse=False):
        setattr(head, name, parameter)
    head.out_features = new.out_features
    model.set_output_embeddings(head)


def _gather(module: nn.Module) -> dict[str, DTensor]:
    """Put whole tensors in place of a module's pieces; return the pieces."""
    placed: dict[str, DTensor] = {}
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            placed[name] = parameter
            setattr(module, name, nn.Parameter(parameter.full_tensor(), requires_grad=False))
    return placed


def _cut(module: nn.Module, name: str, placed: DTensor) -> None:
    """Cut a whole tensor as its pieces were; what the first rank holds counts."""
    mesh: DeviceMesh = placed.device_mesh
    whole = module.get_parameter(name).detach().contiguous()
    dist.broadcast(whole, group=mesh.get_group(), group_src=0)
    local = whole
    placement = placed.placements[-1]
    if placement.is_shard():
        dim = placement.dim  # type: ignore[attr-defined]
        pieces = whole.chunk(mesh.size(), dim=dim)
        rank = mesh.get_local_rank()
        local = pieces[rank].clone() if rank < len(pieces) else whole.narrow(dim, 0, 0).clone()
    cut = DTensor.from_local(
        local.contiguous(),
        mesh,
        placed.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    setattr(module, name, nn.Parameter(cut, requires_grad=False))
