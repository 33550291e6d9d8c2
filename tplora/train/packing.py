"""Rows joined into packs, and micro-batches of joined rows whose borders are still known.

    rows  [a a a] [b b] [c]   ->   packs  [a a a c] [b b]   ->   batch  a a a c b b

A pack is of whole rows, up to ``max_length`` tokens; a batch is of whole packs, one sequence
without padding, in which each row's positions begin at 0 again and its first token has no label.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import datasets
import torch
from trl import pack_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["NUM_TOKENS", "PACKED", "MarksPacks", "pack_rows", "say_packs"]

PACKED = "seq_lengths"
"""The column of packs that says how many tokens each row of one has."""

NUM_TOKENS = "num_tokens_of_packs"
"""The key under which a batch says how many tokens each of its packs has."""


def pack_rows(rows: datasets.Dataset, max_length: int) -> datasets.Dataset:
    """Each row once, in packs of at most ``max_length`` tokens, the longest first; no row is cut.

    The same packs on every rank: trl's best fit, decreasing, of a thousand rows at a time.
    """
    with _without_bars():
        # In memory: a cache file would be one that ranks race for.
        kept = {"keep_in_memory": True, "load_from_cache_file": False}
        return pack_dataset(rows, max_length, "bfd", kept)


def say_packs(packs: datasets.Dataset, max_length: int) -> str:
    """How many rows became how many packs, and how full these are."""
    lengths = packs[PACKED]
    num_rows, num_tokens = sum(map(len, lengths)), sum(map(sum, lengths))
    return (
        f"{num_rows:,} rows in {len(packs):,} packs of up to {max_length:,} tokens, "
        f"{num_tokens / (len(packs) * max_length):.1%} full"
    )


@dataclass(slots=True)
class MarksPacks:
    """trl's collator for joined rows, whose batches say where each pack ends."""

    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The batch, and the number of tokens of each of its packs."""
        sizes = torch.tensor([len(example["input_ids"]) for example in examples])
        return {**self.collate(examples), NUM_TOKENS: sizes}


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    was_on = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_on:
            datasets.enable_progress_bars()
