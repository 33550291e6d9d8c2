"""An adapter as the GGUF file that llama.cpp loads beside a model in GGUF.

``blk.K.NAME.weight.lora_a`` is A [r, in], ``lora_b`` is B [out, r], each read from the last
dimension on; of an embedding A is written as [tokens, r]. The scaling is ``alpha / r``, with one
alpha for the file. The rows of Llama's q and k stand in the order of llama.cpp's rotary embedding,
which turns neighbours: row ``2 i + j`` of a head is the ``i + j d / 2`` of transformers.
"""

from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
import torch

from tplora.artifact.adapter_dir import AdapterFiles
from tplora.artifact.consumers import CONSUMERS
from tplora.artifact.one_scaling import read_pairs, shared_alpha

__all__ = [
    "ADAPTER_FILE",
    "GGUF_TYPES",
    "ModelFacts",
    "turn_heads",
    "turned_heads",
    "write_gguf_adapter",
]

ADAPTER_FILE = "adapter.gguf"
GGUF_TYPES = {
    torch.float32: gguf.GGMLQuantizationType.F32,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
}


class ModelFacts(Protocol):
    """What is read of the base's text config."""

    model_type: str
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int


def write_gguf_adapter(
    adapter: AdapterFiles, base: ModelFacts, path: Path, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write the file; ``check_fit`` has to have found nothing against it.

    Args:
        adapter: To be written.
        base: The text config of its base.
        path: Of the file.
        dtype: float32, float16 or bfloat16.
    """
    name = CONSUMERS["llama.cpp"].model_types[base.model_type]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, base.num_hidden_layers)
    alpha = shared_alpha(adapter)
    writer = gguf.GGUFWriter(path, name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for one in read_pairs(adapter, alpha=alpha):
        weight = f"{names[one.pair.module]}.weight"
        a = one.a.T if one.pair.is_embedding else one.a
        b = _in_gguf_order(one.b, one.pair.module, base, name)
        for factor, tensor in (("lora_a", a), ("lora_b", b)):
            array, kind = _gguf_array(tensor, dtype)
            writer.add_tensor(f"{weight}.{factor}", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _in_gguf_order(rows: torch.Tensor, module: str, base: ModelFacts, arch: str) -> torch.Tensor:
    """Rows of a weight, of its bias or of its B, [out, ...], in GGUF's order: q and k of Llama."""
    num_heads = turned_heads(module, base, arch)
    return rows if num_heads is None else turn_heads(rows, num_heads)


def turned_heads(module: str, base: ModelFacts, arch: str) -> int | None:
    """Heads of the rows of a module that are in another order in GGUF; None if they are not."""
    heads = {"q_proj": base.num_attention_heads, "k_proj": base.num_key_value_heads}
    return heads.get(module.rpartition(".")[2]) if arch == "llama" else None


def turn_heads(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """All rows of some heads in GGUF's order."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def _gguf_array(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[Any, Any]:
    """What ``GGUFWriter.add_tensor`` gets: numbers or, as numpy has no bfloat16, bytes."""
    kind = GGUF_TYPES[dtype]
    array = tensor.to(dtype).float().contiguous().numpy()
    if dtype is torch.bfloat16:
        return gguf.quantize(array, kind), kind
    return array.astype(np.float16 if dtype is torch.float16 else np.float32), kind
