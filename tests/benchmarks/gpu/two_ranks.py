"""Two processes on one card over gloo, or on two over NCCL: the numbers of one process."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.benchmarks.gpu.measure import Size, write_base
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base

SMALL = Size(hidden=512, ffn=1536, heads=8, kv_heads=4, layers=2, length=128, dtype=torch.float32)
WITHIN = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of loss and gradient norm, over the number itself: rounding, that of the base's dtype."""
ON_CARDS = ("allreduce_", "allgather_", "broadcast_", "all_reduce", "wait_tensor")
"""What gloo does with tensors of a card, by way of the host (ProcessGroupGloo.cpp). The all-gather
of functional collectives is not among it: gloo would read the card's addresses as its own."""


def compare(device: torch.device, size: Size = SMALL, *, backend: str = "gloo") -> dict[str, Any]:
    """The largest relative difference of loss and gradient norm over three AdamW steps.

    Args:
        device: The first rank's; NCCL gives the second rank the next card.
        size: Of the model; its dtype says how far numbers may be apart.
        backend: "gloo", or "nccl", which wants a card for each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_base(size, Path(folder) / "base")
        found = []
        for num_ranks in (1, 2):
            file = Path(folder) / f"found-{num_ranks}.pt"
            store = f"{folder}/store-{num_ranks}"
            args = (num_ranks, str(device), path, size, store, str(file), backend)
            mp.spawn(_rank, args, nprocs=num_ranks)
            found.append(torch.load(file))
    one, two = found
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    return {"numbers": one, "worst": worst, "is_same": worst < WITHIN[size.dtype]}


def _rank(
    rank: int,
    num_ranks: int,
    first: str,
    path: str,
    size: Size,
    store: str,
    file: str,
    backend: str,
) -> None:
    own = rank if backend == "nccl" else 0
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(own), WORLD_SIZE=str(num_ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", own) if first.startswith("cuda") else torch.device(first)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if num_ranks > 1:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            device_id=device if backend == "nccl" else None,
        )
    with only_what_gloo_does() if backend == "gloo" else contextlib.nullcontext():
        numbers = _numbers(path, size, device, num_ranks)
    if rank == 0:
        torch.save(numbers, file)
    if num_ranks > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def only_what_gloo_does():
    """While open, a collective that gloo does not do with tensors of a card is an error.

    On a CPU as well, so that a run there shows what one on a card will do. A load compares a sample
    of gathered weights with the checkpoint, by functional all-gathers: not here.
    """
    with mock.patch("tplora.base.load.check_against_checkpoint"), _Refusing():
        yield


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = str(func).split(".")[1]
        is_sent = "c10d" in func.namespace and "wrap_tensor" not in name
        assert not is_sent or name in ON_CARDS, f"gloo on a card: {func}"
        return func(*args, **(kwargs or {}))


def _numbers(path: str, size: Size, device: torch.device, num_ranks: int) -> list[float]:
    base = load_base(path, tp_size=num_ranks, device=device, dtype=size.dtype)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = attach_adapter(base, lora).train()
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, size.vocab, (2, size.length), generator=draw).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, numbers = torch.optim.AdamW(trained, lr=1e-3), []
    for _ in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        numbers += [float(loss.detach()), float(norm)]
    return numbers
