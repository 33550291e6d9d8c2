"""Two processes on one device over gloo: the same losses and gradient norm as one process."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from tests.benchmarks.gpu.measure import Size, write_base
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base

SMALL = Size(hidden=512, ffn=1536, heads=8, kv_heads=4, layers=2, length=128, dtype=torch.float32)


def compare(device: torch.device, size: Size = SMALL) -> dict[str, Any]:
    """The largest relative difference of loss and gradient norm over three AdamW steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_base(size, Path(folder) / "base")
        found = []
        for num_ranks in (1, 2):
            file = Path(folder) / f"found-{num_ranks}.pt"
            store = f"{folder}/store-{num_ranks}"
            args = (num_ranks, str(device), path, size, store, str(file))
            mp.spawn(_rank, args, nprocs=num_ranks)
            found.append(torch.load(file))
    one, two = found
    worst = max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))
    return {"numbers": one, "worst": worst, "is_same": worst < 1e-4}


def _rank(
    rank: int, num_ranks: int, device: str, path: str, size: Size, store: str, file: str
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(num_ranks))
    os.environ.update(LOCAL_WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(0)
    if num_ranks > 1:
        shared = dist.FileStore(store, num_ranks)
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=num_ranks)
    base = load_base(path, tp_size=num_ranks, device=torch.device(device), dtype=size.dtype)
    lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = attach_adapter(base, lora).train()
    numbers = _train(model, size, device)
    if rank == 0:
        torch.save(numbers, file)
    if num_ranks > 1:
        dist.destroy_process_group()


def _train(model: Any, size: Size, device: str) -> list[float]:
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
