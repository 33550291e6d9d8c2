"""Whether the embedding and head that an adapter carries along are the base's own.

PEFT saves them beside adapted ones; a consumer that has the base's own anyway needs none of them,
as long as they are the same.
"""

from pathlib import Path

import torch
from safetensors import safe_open

from tplora.artifact.adapter_dir import AdapterFiles
from tplora.artifact.checkpoint import Checkpoint, read_checkpoint

__all__ = ["find_other_copies"]

_EMBEDDING = "embed_tokens.weight"


def find_other_copies(adapter: AdapterFiles, base: Path) -> list[str]:
    """Keys of copies that are not what the base's files hold, in either's dtype.

    Args:
        adapter: A checked adapter.
        base: The base's folder.

    Raises:
        ArtifactError: If the base's files cannot be read.
    """
    if not adapter.saved_bases:
        return []
    checkpoint = read_checkpoint(base)
    return [
        key
        for module, key in adapter.saved_bases.items()
        if not _is_same(adapter.tensor(key), _own(checkpoint, f"{module}.weight"))
    ]


def _own(checkpoint: Checkpoint, name: str) -> torch.Tensor | None:
    """A head that is tied is held as the embedding."""
    tied = next((held for held in checkpoint.tensors if held.endswith(_EMBEDDING)), name)
    found = name if name in checkpoint.tensors else tied
    if found not in checkpoint.tensors:
        return None
    with safe_open(checkpoint.folder / checkpoint.tensors[found][0], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(found)
    return tensor


def _is_same(copy: torch.Tensor, own: torch.Tensor | None) -> bool:
    if own is None or copy.shape != own.shape:
        return False
    return torch.equal(copy.to(own.dtype), own) or torch.equal(own.to(copy.dtype), copy)
