"""What a rank takes while a base loads in 4 or 8 bits, above what it had before."""

import gc
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.models import world_size
from tests.quantized import quantization
from tests.world import World
from tplora.base.load import load_base
from tplora.base.verify import check_against_checkpoint
from tplora.plan.build import plan_model
from tplora.plan.cost import base_bytes, loading_bytes
from tplora.upstream import build_meta_model, local_shard
from tplora.upstream.quantization import is_quantized_linear

INTERVAL_S = 0.001
SAVED = "nf4-double, saved"
"""A checkpoint that transformers has quantised and written."""


@dataclass(frozen=True)
class Size:
    """A Llama in bfloat16 whose pieces are whole blocks on 2 and 3 ranks."""

    hidden: int = 1536
    ffn: int = 6144
    layers: int = 8
    vocab: int = 4096

    @property
    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            num_attention_heads=24,
            num_key_value_heads=12,
            head_dim=64,
            dtype=torch.bfloat16,
        )


def write_base(size: Size, folder: Path) -> str:
    model = AutoModelForCausalLM.from_config(size.config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return str(folder)


def write_quantized(path: str, folder: Path) -> str:
    whole = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        quantization_config=quantization("nf4-double"),
        device_map={"": "cpu"},
    )
    whole.save_pretrained(folder)
    return str(folder)


class PeakOfProcess(threading.Thread):
    """The most of the process's own memory that was resident, beyond what was when it started.

    Pages of mapped files do not count: the kernel drops them when it needs the memory.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stopped = threading.Event()
        self._first = self._most = _own_bytes()

    def __enter__(self) -> "PeakOfProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._most = max(self._most, _own_bytes())

    @property
    def num_bytes(self) -> int:
        return self._most - self._first


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise OSError("/proc/self/status: has no RssAnon")


def load_and_measure(path: str, warm_path: str, method: str) -> dict[str, object]:
    """On every rank: the peak while ``path`` loads, and what is held afterwards."""
    given = {} if method == SAVED else {"quantization_config": quantization(method)}
    options = {"tp_size": world_size(), "dtype": torch.bfloat16}
    load_base(warm_path, **options, **given)  # imports, kernels, the mesh
    gc.collect()
    with PeakOfProcess() as peak, mock.patch("tplora.base.load.check_against_checkpoint") as check:
        model = load_base(path, **options, **given)
    with PeakOfProcess() as checking:
        check_against_checkpoint(*check.call_args.args)
    parameters = dict(model.named_parameters())
    held = sum(local_shard(p).nbytes for p in parameters.values())
    quantized = [m for m in model.modules() if is_quantized_linear(m)]
    return {"method": method, "peak_bytes": peak.num_bytes, "weight_bytes": held} | {
        "num_quantized": len(quantized),
        "checking_bytes": checking.num_bytes,
    }


def bound(size: Size, method: str, tp_size: int) -> dict[str, int]:
    """From the plan: what is held on the first rank, and two unquantised pieces on top."""
    from peft import LoraConfig  # noqa: PLC0415  (slow)

    model = build_meta_model(size.config, trust_remote_code=False)
    plan = plan_model(
        model,
        LoraConfig(target_modules=["q_proj"]),
        tp_size=tp_size,
        base_dtype="bfloat16",
        quantization=quantization("nf4-double" if method == SAVED else method),
    )
    held = base_bytes(plan, 0, bytes_per_element=2)
    return {"held": held, "bound": held + loading_bytes(plan, 0, bytes_per_element=2)}


def compare(
    size: Size, path: str, warm_path: str, tp_size: int, methods: Sequence[str]
) -> list[dict[str, object]]:
    """One record for each method, of the rank that took the most; its process is a fresh one."""
    records = []
    for method in methods:
        with World(tp_size) as world:  # what a process has freed it may take again unseen
            found = world.run(load_and_measure, path, warm_path, method)
        most = max(found, key=lambda one: one["peak_bytes"])
        records.append({"tp_size": tp_size, **most, **bound(size, method, tp_size), **asdict(size)})
    return records
