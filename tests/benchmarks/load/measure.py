"""Loading a base: bytes that come out of its files on each rank, and seconds."""

import contextlib
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig, PretrainedConfig

from tests.models import world_size
from tplora.base.load import load_base
from tplora.upstream import local_shard

KINDS = ("tplora", "transformers")


@dataclass(frozen=True)
class Size:
    """A Llama in bfloat16."""

    hidden: int = 2048
    ffn: int = 5632
    layers: int = 12
    vocab: int = 32000
    is_tied: bool = False

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            num_attention_heads=24 if self.hidden % 24 == 0 else 16,
            num_key_value_heads=12 if self.hidden % 24 == 0 else 8,
            head_dim=64,
            tie_word_embeddings=self.is_tied,
            dtype=torch.bfloat16,
        )


def write_base(size: Size, folder: Path) -> str:
    model = AutoModelForCausalLM.from_config(size.config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="400MB")
    return str(folder)


class _Slice:
    def __init__(self, held: Any, count: list[int]) -> None:
        self._held, self._count = held, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        piece = self._held[index]
        self._count.append(piece.nbytes)
        return piece


class _File:
    """``safe_open``, counting the bytes of every piece that is taken out."""

    def __init__(self, count: list[int], *args: Any, **kwargs: Any) -> None:
        self._held, self._count = safe_open(*args, **kwargs), count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._held, name)

    def __enter__(self) -> "_File":
        self._held.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._held.__exit__(*error)

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._held.get_slice(name), self._count)

    def get_tensor(self, name: str) -> torch.Tensor:
        tensor = self._held.get_tensor(name)
        self._count.append(tensor.nbytes)
        return tensor


@contextlib.contextmanager
def counted(module: str) -> Iterator[list[int]]:
    """While open, the bytes of each piece that code of ``module`` takes out of a file."""
    count: list[int] = []
    with mock.patch(f"{module}.safe_open", lambda *args, **kwargs: _File(count, *args, **kwargs)):
        yield count


def load(path: str, kind: str) -> Any:
    if kind == "tplora":
        return load_base(path, tp_size=world_size(), dtype=torch.bfloat16)
    parallel = DistributedConfig(tp_size=world_size()) if world_size() > 1 else None
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, distributed_config=parallel
    )


def read_bytes(path: str) -> dict[str, int]:
    """On every rank: bytes that loading reads, that comparing a sample reads, and that are held."""
    with (
        counted("transformers.modeling_utils") as loading,
        counted("tplora.base.verify") as checking,
    ):
        model = load(path, "tplora")
    held = {id(p): local_shard(p).nbytes for p in model.parameters()}
    return {"loading": sum(loading), "checking": sum(checking), "share": sum(held.values())}


def seconds(path: str, kind: str) -> tuple[float, float]:
    """On every rank: one load, from the first rank's start to the last one's end; its own work."""
    gc.collect()
    if dist.is_initialized():
        dist.barrier()
    start, start_work = time.perf_counter(), time.process_time()
    model = load(path, kind)
    for parameter in model.parameters():
        local_shard(parameter).view(-1)[:: 1 << 12].sum()  # pages of a mapped file come when read
    work = time.process_time() - start_work
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter() - start, work
