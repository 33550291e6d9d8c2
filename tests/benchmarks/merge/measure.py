"""Peak memory of a merge from files above what was held before; its time beside a copy."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig

from tests.merging import merge_one
from tplora.upstream import build_meta_model


@dataclass(frozen=True)
class Size:
    """A Llama of 2.2 GB in bfloat16, in five files."""

    hidden: int = 2048
    ffn: int = 5632
    layers: int = 22
    vocab: int = 32000
    dtype: str = "bfloat16"
    shard_bytes: int = 500_000_000
    r: int = 16

    @property
    def config(self):
        return AutoConfig.for_model(
            "llama",
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            vocab_size=self.vocab,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(1, self.hidden // 256),
            dtype=getattr(torch, self.dtype),
            tie_word_embeddings=False,
        )


def write_base(size: Size, folder: Path) -> Path:
    """One file at a time: the model is never held."""
    model = build_meta_model(size.config, trust_remote_code=False)
    folder.mkdir(parents=True)
    size.config.architectures = ["LlamaForCausalLM"]
    size.config.save_pretrained(folder)
    files, held = [{}], 0
    for name, tensor in model.state_dict().items():
        num_bytes = tensor.numel() * getattr(torch, size.dtype).itemsize
        if held and held + num_bytes > size.shard_bytes:
            files.append({})
            held = 0
        files[-1][name] = tuple(tensor.shape)
        held += num_bytes
    weight_map = {}
    for k, shapes in enumerate(files, 1):
        file = f"model-{k:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            n: torch.randn(s).mul_(0.02).to(getattr(torch, size.dtype)) for n, s in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(size: Size, folder: Path) -> Path:
    """Every linear layer but the head."""
    model = build_meta_model(size.config, trust_remote_code=False)
    LoraConfig(
        r=size.r, target_modules="all-linear", task_type="CAUSAL_LM", base_model_name_or_path="x"
    ).save_pretrained(folder)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            key = f"base_model.model.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(size.r, module.in_features) * 0.05
            tensors[f"{key}B.weight"] = torch.randn(module.out_features, size.r) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def copy_files(base: Path, out: Path) -> None:
    """What there is to hold a merge's time to: every byte read, written and brought to disk."""
    out.mkdir()
    for path in base.iterdir():
        shutil.copyfile(path, out / path.name)
        descriptor = os.open(out / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure_here(base: Path, adapter: Path, out: Path, num_repeats: int) -> dict:
    """One merge for the memory, then merges and copies in turn."""
    started = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    merge_one(str(base), adapter, out)
    peak = _status("VmHWM") - started
    shutil.rmtree(out)
    ratios, merges, copies = [], [], []
    for _ in range(num_repeats):
        copies.append(_timed(lambda: copy_files(base, out)))
        shutil.rmtree(out)
        merges.append(_timed(lambda: merge_one(str(base), adapter, out)))
        shutil.rmtree(out)
        ratios.append(merges[-1] / copies[-1])
    middle = sorted(range(num_repeats), key=ratios.__getitem__)[num_repeats // 2]
    files = [path.stat().st_size for path in base.glob("*.safetensors")]
    return {
        "peak_bytes": peak,
        "largest_file": max(files),
        "base_bytes": sum(files),
        "merge_s": merges[middle],
        "copy_s": copies[middle],
        "ratios": ratios,
    }


def measure(size: Size, folder: Path, num_repeats: int = 3) -> dict:
    """In a process of its own, so that what wrote the base is not in the peak."""
    base = write_base(size, folder / "base")
    adapter = write_adapter(size, folder / "adapter")
    code = (
        "import json, sys; from pathlib import Path; "
        "from tests.benchmarks.merge.measure import measure_here; "
        "print(json.dumps(measure_here(*map(Path, sys.argv[1:4]), int(sys.argv[4]))))"
    )
    arguments = [str(base), str(adapter), str(folder / "out"), str(num_repeats)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1]) | asdict(size)


def _timed(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
