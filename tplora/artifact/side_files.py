"""What lies beside the weights of a model: its index and configs, its tokenizer, its licence."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tplora.artifact.checkpoint import INDEX
from tplora.saved.files import find_file

__all__ = [
    "cast_in_config",
    "copy_side_files",
    "copy_tokenizer",
    "grow_in_config",
    "untie_in_config",
    "write_index",
]

# Weights in any format and their indices; the base's card and git's files speak of the base only.
_LEFT_OUT = (
    "*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx",
    "*.index.json", "README.md", ".*",
)  # fmt: skip
_TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "chat_template.*", "additional_chat_templates",
)  # fmt: skip


def copy_side_files(base: Path, adapter: Path, out: Path) -> None:
    """Copy everything but weights from ``base``; the adapter's tokenizer, if it has one, wins.

    Then none of the base's tokenizer files is kept: two halves of two tokenizers load, and are
    neither.
    """
    has_own = (adapter / "tokenizer_config.json").is_file()
    for path in sorted(base.iterdir()):
        if not (_matches(path, _LEFT_OUT) or (has_own and _matches(path, _TOKENIZER))):
            _copy(path, out)
    if has_own:
        copy_tokenizer(adapter, out)


def copy_tokenizer(adapter: Path, out: Path) -> None:
    """Copy the tokenizer and the chat template that an adapter's folder holds, if it does."""
    for path in sorted(adapter.iterdir()):
        if _matches(path, _TOKENIZER):
            _check_own(path)
            _copy(path, out)


def _check_own(path: Path) -> None:
    """What comes with an adapter may be anybody's: no link of it leads to another's files."""
    inner = sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else []
    for one in (path, *inner):
        if one.is_symlink() or not one.is_dir():
            find_file(one.parent, [one.name])


def write_index(
    folder: Path,
    files: Mapping[str, str],
    base_index: dict[str, Any] | None,
    num_bytes: int,
) -> None:
    """Write which file holds which tensor, with the base's notes where they still hold.

    Args:
        folder: Where the weight files are.
        files: Tensor to file.
        base_index: The base's own index, if it has one.
        num_bytes: Of all tensors.
    """
    notes = {} if base_index is None else base_index.get("metadata", {})
    if base_index is None or base_index["weight_map"] != files or "total_size" not in notes:
        index = {
            "metadata": {**notes, "total_size": num_bytes},
            "weight_map": dict(sorted(files.items())),
        }
    else:
        index = {**base_index, "metadata": {**notes, "total_size": num_bytes}}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    (folder / INDEX).write_text(text, encoding="utf-8")


def untie_in_config(folder: Path) -> None:
    """Say in ``config.json`` that embedding and head are two weights."""
    _set_in_config(folder, "tie_word_embeddings", value=False, is_added=True)


def grow_in_config(folder: Path, vocab_size: int) -> None:
    """Say in ``config.json`` how many tokens the model has."""
    _set_in_config(folder, "vocab_size", value=vocab_size, is_added=False)


def cast_in_config(folder: Path, dtype: torch.dtype) -> None:
    """Say in ``config.json`` what the weights are written in, under the names that it has."""
    name = str(dtype).removeprefix("torch.")
    for key in ("dtype", "torch_dtype"):
        _set_in_config(folder, key, value=name, is_added=False)


def _set_in_config(folder: Path, key: str, *, value: object, is_added: bool) -> None:
    """Of the model and of its text part; a key that is not there is added only if asked for."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (is_added or key in part):
            part[key] = value
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def _copy(path: Path, out: Path) -> None:
    if path.is_file():
        shutil.copyfile(path, out / path.name)  # follows the hub cache's links; modes are ours
    elif path.name == "additional_chat_templates":
        shutil.copytree(path, out / path.name, copy_function=shutil.copyfile)
