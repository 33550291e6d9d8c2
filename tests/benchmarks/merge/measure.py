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
from transformers import AutoConfig, BitsAndBytesConfig

from tests.merging import merge_one
from tplora.artifact.base_tensors import FileTensors
from tplora.artifact.checkpoint import read_checkpoint
from tplora.artifact.dequantized import DequantizedTensors
from tplora.artifact.gguf_model import write_gguf_model
from tplora.artifact.merge import merge_into
from tplora.artifact.merge_plan import plan_merge
from tplora.artifact.reading import read_base_and_adapters
from tplora.base.quantized_whole import rounded
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


def copy_files(base: Path, out: Path, *, is_settled: bool = True) -> None:
    """What there is to hold a merge's time to: every byte read, written and brought to disk."""
    out.mkdir()
    for path in base.iterdir():
        shutil.copyfile(path, out / path.name)
        if is_settled:
            descriptor = os.open(out / path.name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def measure_here(base: Path, adapter: Path, out: Path, num_repeats: int) -> dict:
    """One merge for the memory, then merges and copies in turn."""
    peak = peak_of(lambda: merge_one(base, adapter, out))
    shutil.rmtree(out)
    ratios, merges, copies, cached, cpu = [], [], [], [], []
    for _ in range(num_repeats):
        copies.append(_timed(lambda: copy_files(base, out)))
        shutil.rmtree(out)
        before = os.times()
        merges.append(_timed(lambda: merge_one(base, adapter, out)))
        cpu.append([os.times().user - before.user, os.times().system - before.system])
        shutil.rmtree(out)
        cached.append(_timed(lambda: copy_files(base, out, is_settled=False)))
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
        "copy_to_cache_s": cached[middle],
        "merge_cpu_s": cpu[middle],
        "plan_s": _timed(lambda: _plan(base, adapter)),
        "cores": len(os.sched_getaffinity(0)),
        "ratios": ratios,
    }


def _plan(base: Path, adapter: Path) -> None:
    """What a merge does before its first byte."""
    with FileTensors(read_checkpoint(base)) as source:
        found, changes = read_base_and_adapters(source, {adapter: 1.0})
        plan_merge(found, source.checkpoint, changes)


def measure(size: Size, folder: Path, num_repeats: int = 3) -> dict:
    """In a process of its own, so that what wrote the base is not in the peak."""
    return _elsewhere("measure_here", size, folder, num_repeats) | asdict(size)


def measure_peaks(size: Size, folder: Path) -> dict:
    """The same, of memory alone."""
    return _elsewhere("peaks_here", size, folder)


def _elsewhere(name: str, size: Size, folder: Path, *numbers: int) -> dict:
    paths = (
        write_base(size, folder / "base"), write_adapter(size, folder / "adapter"), folder / "out"
    )  # fmt: skip
    code = (
        "import json, sys; from pathlib import Path; from tests.benchmarks.merge import measure; "
        f"print(json.dumps(measure.{name}(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, (*paths, *numbers))],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def peaks_here(base: Path, adapter: Path, out: Path) -> dict:
    """What a merge takes, one into the base as nf4 holds it, and a GGUF file."""

    def merge_dequantized():
        given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        with DequantizedTensors(base, dtype=torch.bfloat16, given=given) as source:
            merge_into(source, {adapter: 1.0}, out / "dequantized")

    unpack_something()  # what bitsandbytes and its library take is not the merge's
    return {
        "merge": peak_of(lambda: merge_one(base, adapter, out / "merged")),
        "dequantized": peak_of(merge_dequantized),
        "gguf": peak_of(lambda: write_gguf_model(out / "merged", out / "model.gguf")),
        "largest_file": max(path.stat().st_size for path in base.glob("*.safetensors")),
    }


def unpack_something() -> None:
    rounded(torch.ones(64, 64), BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"))


def peak_of(run) -> int:
    """Resident bytes above what was held before."""
    started = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    run()
    return _status("VmHWM") - started


def _timed(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
