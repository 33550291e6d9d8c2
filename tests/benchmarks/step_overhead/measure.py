"""Backward's end, clipping and the optimizer's step over hundreds of factors, part by part."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.models import load, lora
from tplora.train.local_steps import clip_local_gradients, step_on_pieces

KINDS = ("dtensor", "pieces")
"""Torch's clipping and fused AdamW on DTensors, which unmodified trainers call; and on pieces."""


@dataclass(frozen=True)
class Size:
    """A model of many layers that are small: what is left of a step is what each factor costs."""

    num_layers: int = 30
    num_tokens: int = 8
    r: int = 4

    @property
    def num_factors(self) -> int:
        return 14 * self.num_layers


def on_ranks(path: str, size: Size, num_repeats: int) -> list[dict]:
    """Records of this rank, both kinds in turn; the first two steps are warm-up."""
    steps = {kind: _Steps(path, size, kind) for kind in KINDS}
    about, records = asdict(size) | {"num_factors": size.num_factors}, []
    for repeat in range(num_repeats + 2):
        for kind in KINDS if repeat % 2 else reversed(KINDS):
            seconds = steps[kind]()
            if repeat > 1:
                records.append(about | {"kind": kind, "repeat": repeat, **seconds})
    return records


class _Steps:
    def __init__(self, path: str, size: Size, kind: str) -> None:
        self.model = load(path, lora("all-linear", r=size.r), dtype=torch.float32)
        self.factors = list(self.model.factors().values())
        assert len(self.factors) == size.num_factors
        self.parameters = [factor.parameter for factor in self.factors]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.is_local = kind == "pieces"
        if self.is_local:
            step_on_pieces(self.optimizer, self.factors)
        self.tokens = torch.arange(3, 3 + size.num_tokens)[None]

    def __call__(self) -> dict[str, float]:
        parts = {
            "forward_backward_s": self._forward_backward,
            "clip_s": self._clip,
            "optimizer_s": self.optimizer.step,
            "zero_s": self.optimizer.zero_grad,
        }
        seconds = {name: _seconds(part) for name, part in parts.items()}
        return seconds | {"step_s": sum(seconds.values())}

    def _forward_backward(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def _clip(self) -> None:
        if self.is_local:
            clip_local_gradients(self.factors, 1.0, self.model.mesh.get_group())
            return
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        if isinstance(norm, DTensor):
            norm.full_tensor()


def _seconds(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def summary(records: list[dict]) -> dict[str, dict[str, float]]:
    """By part of a step: medians of both kinds in ms, and the median of the paired ratios."""
    found = {}
    for part in ("forward_backward_s", "clip_s", "optimizer_s", "zero_s", "step_s"):
        times = {kind: [r[part] for r in records if r["kind"] == kind] for kind in KINDS}
        ratios = [ours / theirs for theirs, ours in zip(*times.values(), strict=True)]
        found[part.removesuffix("_s")] = {
            **{f"{kind} ms": 1e3 * statistics.median(one) for kind, one in times.items()},
            "pieces / dtensor": statistics.median(ratios),
        }
    return found
