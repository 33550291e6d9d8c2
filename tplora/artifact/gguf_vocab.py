"""A byte-level BPE tokenizer in a GGUF file, where llama.cpp has its way of splitting by name."""

import json
from pathlib import Path
from typing import Any

import gguf

from tplora.errors import ArtifactError
from tplora.saved.files import read_json

__all__ = ["add_vocabulary", "check_vocabulary"]

# What a tokenizer.json splits text by, to what llama.cpp calls it (src/llama-vocab.cpp).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REGEXES = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}
_ELSE = "merge into a folder and convert that with llama.cpp's convert_hf_to_gguf.py"


def check_vocabulary(folder: Path) -> None:
    """Refuse a tokenizer that is none that is written exactly; none at all is well.

    Raises:
        ArtifactError: With what it is and what to do.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        _way_of_splitting(path, read_json(path))
    elif any(folder.glob("tokenizer*")):
        raise ArtifactError(f"{folder}: its tokenizer has no tokenizer.json; {_ELSE}")


def add_vocabulary(writer: Any, folder: Path, vocab_size: int) -> None:
    """Add the tokenizer of a model's folder, or say that there is none.

    Args:
        writer: A ``gguf.GGUFWriter``.
        folder: Of the model.
        vocab_size: Rows of its embedding; what no token has is filled up with unused ones.

    Raises:
        ArtifactError: If the tokenizer is none that is written exactly.
    """
    check_vocabulary(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    found = read_json(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_way_of_splitting(path, found))
    tokens, types = _tokens(path, found, vocab_size)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer)


def _tokens(path: Path, found: Any, vocab_size: int) -> tuple[list[str], list[int]]:
    kinds = gguf.TokenType
    held = {number: (token, kinds.NORMAL) for token, number in found["model"]["vocab"].items()}
    for added in found.get("added_tokens", ()):
        kind = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
        held[added["id"]] = (added["content"], kind)
    if max(held) >= vocab_size:
        raise ArtifactError(
            f"{path}: has a token {max(held)}, the model has {vocab_size} tokens; resize it first"
        )
    rows = [held.get(number, (f"[PAD{number}]", kinds.UNUSED)) for number in range(vocab_size)]
    return [token for token, _ in rows], [int(kind) for _, kind in rows]


def _way_of_splitting(path: Path, found: Any) -> str:
    if found["model"].get("type") != "BPE":
        raise ArtifactError(f"{path}: is a {found['model'].get('type')} tokenizer; {_ELSE}")
    if (found.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        raise ArtifactError(f"{path}: normalises text in a way of its own; {_ELSE}")
    way = found.get("pre_tokenizer") or {}
    steps = way["pretokenizers"] if way.get("type") == "Sequence" else [way]
    kinds = [step.get("type") for step in steps]
    is_split = bool(steps[-1].get("use_regex", True))
    if kinds == ["Split", "ByteLevel"] and not is_split:
        name = _REGEXES.get(steps[0]["pattern"].get("Regex", ""))
    elif kinds == ["Digits", "ByteLevel"] and is_split and steps[0].get("individual_digits"):
        name = "smollm"
    else:
        name = "gpt-2" if kinds == ["ByteLevel"] and is_split else None
    if name is None or steps[-1].get("add_prefix_space"):
        said = json.dumps(way)[:200]
        raise ArtifactError(f"{path}: splits text as {said}, not known by name; {_ELSE}")
    return name
