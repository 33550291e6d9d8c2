"""The files of a checkpoint on this machine, by the tensors that they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from safetensors import safe_open

from tplora.saved.files import check_file_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["find_safetensors"]


def find_safetensors(path: str, options: Mapping[str, Any]) -> dict[str, Path]:
    """The file of every tensor of a checkpoint in safetensors; empty where there is none.

    Args:
        path: What ``from_pretrained`` has loaded: a folder or a hub id.
        options: The arguments of ``from_pretrained``, some of which say which one of a hub id.
    """
    is_other = options.get("gguf_file") or options.get("variant")
    if is_other or options.get("use_safetensors") is False:
        return {}
    folder = Path(path)
    if not folder.is_dir():
        wanted = {key: options[key] for key in ("revision", "cache_dir") if options.get(key)}
        folder = Path(snapshot_download(path, local_files_only=True, **wanted))
    folder /= options.get("subfolder") or ""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():  # as transformers prefers it
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        where = str(index)
        return {name: folder / check_file_name(file, where=where) for name, file in names.items()}
    return {}
