"""Dropout whose masks do not depend on tp_size: drawn for the full input, each rank uses its slice.

    mask = f(seed, number of the forward, data rank, place of the layer in the forward)

At the start of a training forward of the whole model the default generators are seeded from (seed,
number of the forward, data rank), equally on all ranks of a tp group, and put back afterwards.
Inside, each layer draws one key from the CPU generator and its mask from a generator with that key.
Activation checkpointing saves and restores the default generators around each block, so that the
recomputed masks are the same ones. Other random layers of the model, which draw from the default
generators too, agree between the ranks of a tp group by the same means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tplora.plan.style import shard_range

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ForwardSeed", "ShardedDropout", "drop"]

_KEY_BITS = 62


class ForwardSeed:
    """Seeds the default generators for the length of one root forward, in training only.

    Args:
        seed: The run's seed.
        data_rank: This tp group's place on the data axes: other rows get other masks.
    """

    def __init__(self, seed: int, data_rank: int = 0) -> None:
        self.seed, self.data_rank = seed, data_rank
        self.num_forwards = 0
        """Training forwards so far. With the seed, all the state there is."""
        self._saved: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def enter(self, module: nn.Module, _args: Any, _kwargs: Any = None) -> None:
        """Forward pre-hook of the root module."""
        if not module.training:
            return
        has_cuda = torch.cuda.is_available()
        self._saved.append(
            (torch.get_rng_state(), torch.cuda.get_rng_state() if has_cuda else None)
        )
        key = _mix(self.seed, self.data_rank, self.num_forwards)
        torch.default_generator.manual_seed(key)
        if has_cuda:
            torch.cuda.manual_seed(key)
        self.num_forwards += 1

    def leave(self, _module: nn.Module, _args: Any, _outputs: Any) -> None:
        """Forward hook of the root module, called even when the forward raised."""
        if not self._saved:
            return
        cpu_state, cuda_state = self._saved.pop()
        torch.set_rng_state(cpu_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)


def _mix(*numbers: int) -> int:
    """One well-spread 62-bit number from several: SplitMix64's finaliser, Steele et al. 2014."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> (64 - _KEY_BITS)


def drop(x: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` where it is kept, so much more of it that its mean stays."""
    return x * keep.to(x.dtype) / (1.0 - p)


class ShardedDropout(nn.Dropout):
    """Inverted dropout on the input of A.

        y = x * mask / (1 - p),   mask ~ Bernoulli(1 - p), equal at every tp_size

    Shapes, per rank:
        x   [..., I] replicated (column-parallel) or [..., I/P] sharded (row-parallel)
        y   as x, in the same state

    Communication: none; every rank draws the mask of the full input and keeps its slice. A torch
    ``Dropout``, so that what sets the ``p`` of those to 0, as trl's DPO does, sets this one's.

    Args:
        p: The share of the input that is zeroed.
        in_features: The full width I of the layer's input.
        mesh: The tp mesh if x is cut, else None.
    """

    def __init__(self, p: float, *, in_features: int, mesh: DeviceMesh | None) -> None:
        super().__init__(p)
        self.in_features = in_features
        self._range = (0, in_features)
        if mesh is not None:
            self._range = shard_range(in_features, mesh.get_local_rank(), mesh.size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop in training, pass in evaluation."""
        keep = self.draw(x)
        return x if keep is None else drop(x, keep, self.p)

    def draw(self, x: torch.Tensor) -> torch.Tensor | None:
        """Which numbers of ``x`` are kept, in training."""
        if not self.training or self.p == 0:
            return None
        key = int(torch.empty((), dtype=torch.int64).random_(2**_KEY_BITS))
        # Without storage, in a rehearsal, there is nothing to draw.
        generator = None if x.is_meta else torch.Generator(device=x.device).manual_seed(key)
        shape = (*x.shape[:-1], self.in_features)
        drawn = torch.rand(shape, generator=generator, device=x.device)
        return drawn[..., slice(*self._range)] >= self.p

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"p={self.p}, in_features={self.in_features}, slice={self._range}"
