"""A head on this rank's part of the vocabulary, a few tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tplora.adapter.head import softmax

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    Project = Callable[..., torch.Tensor]

__all__ = ["ChunkedHead"]

CHUNK_BYTES = 64 * 2**20
"""Logits of one chunk in float32, per rank: large enough for full-speed products."""


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """What computes logits ``[n, V/P]``, and what is read from them."""

    project: Project
    num_inputs: int
    """Tensors before the head's own: ``project(*inputs, *parameters)``."""
    vocab_start: int
    vocab_size: int
    group: ProcessGroup | None
    is_label_only: bool = False
    """Whether nothing but the label's log-probability is asked for."""

    @property
    def chunk_size(self) -> int:
        """How many tokens have their logits computed at once."""
        num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        return max(1, CHUNK_BYTES // (4 * -(-self.vocab_size // num_ranks)))

    def logits(self, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """This rank's logits of one chunk, float32 (float64 for a float64 model)."""
        z = self.project(*tensors)
        return z if z.dtype == torch.float64 else z.float()

    def chunks(
        self, tensors: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
        """Rows of the inputs, few enough that their logits stay small, with the parameters."""
        step = self.chunk_size
        inputs, parameters = tensors[: self.num_inputs], tensors[self.num_inputs :]
        for start in range(0, inputs[0].shape[0], step):
            rows = slice(start, start + step)
            yield rows, (*(tensor[rows] for tensor in inputs), *parameters)

    def partial(self, logits: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What this rank has to say of a chunk's tokens, and ``e^(z-m)``."""
        return softmax.partial_statistics(
            logits, own, self.vocab_start, is_label_only=self.is_label_only
        )
