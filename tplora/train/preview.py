"""One row as the model will see it, with what is learned of it marked."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from datasets import Dataset
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from tplora.train.tokens import IGNORED

__all__ = ["preview"]

_MAX_CHARS = 1200


def preview(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, row: int = 0, markup: bool = False
) -> str:
    """Decode one row, special tokens included, with the supervised part marked.

    Args:
        dataset: The dataset of `TokenizedRows`.
        tokenizer: What it was made with.
        row: Which row, from 0.
        markup: Mark with rich's markup (bold green, the rest dim) instead of ``[[`` and ``]]``.
    """
    parts = [
        _marked(_shortened(tokenizer.decode(ids)), is_supervised=is_supervised, markup=markup)
        for is_supervised, ids in _runs(dataset[row])
    ]
    return "".join(parts)


def _runs(tokens: Mapping[str, Any]) -> Iterator[tuple[bool, list[int]]]:
    """Pieces of a row in order; of a pair the better answer, then the other."""
    if "input_ids" not in tokens:
        yield False, tokens["prompt_ids"]
        for name in ("completion_ids", "chosen_ids", "rejected_ids"):
            if name in tokens:
                yield True, tokens[name]
        return
    pairs = zip(tokens["input_ids"], tokens["labels"], strict=True)
    for is_supervised, run in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        yield is_supervised, [token_id for token_id, _ in run]


def _marked(text: str, *, is_supervised: bool, markup: bool) -> str:
    if markup:
        return f"[{'bold green' if is_supervised else 'dim'}]{escape(text)}[/]"
    return f"[[{text}]]" if is_supervised else text


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} ...({len(text) - 2 * half} characters)... {text[-half:]}"
