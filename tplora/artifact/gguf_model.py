"""A model's folder as the one GGUF file that llama.cpp and transformers read: the Llama family.

Weights are written one after another, some rows at a time, so that memory does not depend on the
model's size; norms and biases in float32, as llama.cpp computes them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tplora.artifact.checkpoint import Checkpoint, read_checkpoint
from tplora.artifact.consumers import CONSUMERS
from tplora.artifact.gguf_adapter import GGUF_TYPES, turn_heads, turned_heads
from tplora.artifact.gguf_vocab import add_vocabulary
from tplora.artifact.tensor_file import Memory, Place, bytes_of, read_rows, row_chunks
from tplora.errors import ArtifactError
from tplora.files import file_written_aside

__all__ = ["check_gguf_model", "write_gguf_model"]

_KINDS = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}
_ELSE = "merge into a folder and convert that with llama.cpp's convert_hf_to_gguf.py"


def check_gguf_model(where: str, config: Any) -> None:
    """Refuse a model whose GGUF would not say all that its config says.

    Raises:
        ArtifactError: With every reason.
    """
    known = CONSUMERS["llama.cpp"].model_types
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = []
    if config.model_type not in known:
        reasons.append(f"its model_type is {config.model_type!r}, {', '.join(known)} are written")
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        reasons.append(f"its rotary embedding is scaled ({rope['rope_type']!r})")
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        reasons.append(f"its attention has a window (sliding_window = {config.sliding_window})")
    if getattr(config, "hidden_act", "silu") != "silu":
        reasons.append(f"its hidden_act is {config.hidden_act!r}")
    biased = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    reasons += [f"it has biases that transformers reads from no such GGUF ({n})" for n in biased]
    if reasons:
        raise ArtifactError(f"{where}: cannot be written as GGUF: {'; '.join(reasons)}; {_ELSE}")


def write_gguf_model(
    folder: Path, path: Path, *, dtype: torch.dtype | None = None, overwrite: bool = False
) -> None:
    """Write the model in ``folder``, safetensors of transformers' names, as the file ``path``.

    Args:
        folder: Of the model.
        path: Of the file; it appears whole.
        dtype: float32, float16 or bfloat16; the config's own when left out.
        overwrite: Replace the file.

    Raises:
        ArtifactError: If the model cannot be written exactly.
    """
    config = AutoConfig.from_pretrained(folder)
    check_gguf_model(str(folder), config)
    kind = dtype or (config.dtype if config.dtype in _KINDS else torch.float32)
    arch = CONSUMERS["llama.cpp"].model_types[config.model_type]
    with file_written_aside(path, overwrite=overwrite) as aside:
        writer = gguf.GGUFWriter(aside, arch)
        _add_config(writer, config, _KINDS[kind])
        add_vocabulary(writer, folder, config.vocab_size)
        names = _names(folder, config, arch)
        factors = _rope_factors(config)
        if factors is not None:
            array = factors.numpy()
            writer.add_tensor_info("rope_freqs.weight", array.shape, array.dtype, array.nbytes)
        weights = _weights(read_checkpoint(folder), names, config, arch, kind)
        for weight in weights:
            writer.add_tensor_info(
                names[weight.name],
                list(weight.place.shape),
                np.dtype(np.float32),
                weight.nbytes,
                raw_dtype=GGUF_TYPES[weight.dtype],
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors.numpy())
        for weight in weights:
            writer.write_tensor_data(weight)
        writer.close()


def _add_config(writer: Any, config: Any, kind: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_type(gguf.GGUFType.MODEL)
    # Not "mistral", which transformers 5.24 looks up in gguf in vain; without a window it is Llama.
    writer.add_name(config.model_type.title())
    writer.add_file_type(kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base((config.rope_parameters or {})["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _rope_factors(config: Any) -> torch.Tensor | None:
    """What llama.cpp divides Llama 3's frequencies by, [head_dim / 2]; None if nothing scales them.

    ``rope_freqs = theta^(-2 i / d) / f_i`` with the frequencies f that transformers turns by.
    """
    if (config.rope_parameters or {}).get("rope_type", "default") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(scaled)
    theta = float(config.rope_parameters["rope_theta"])
    usual: torch.Tensor = theta ** -(torch.arange(0, size, 2).double() / size)
    factors: torch.Tensor = usual / scaled.double()
    return factors.float()


def _names(folder: Path, config: Any, arch: str) -> dict[str, str]:
    """A tensor's name in the folder to its name in GGUF, in the order of the file."""
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    found = {}
    for name in read_checkpoint(folder).tensors:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ArtifactError(f"{folder}: GGUF has no name for {name}; {_ELSE}")
        found[name] = own
    return found


def _weights(
    checkpoint: Checkpoint, names: Mapping[str, str], config: Any, arch: str, kind: torch.dtype
) -> list["_Weight"]:
    found = []
    for name in names:
        file, place = checkpoint.tensors[name]
        found.append(
            _Weight(
                name=name,
                file=checkpoint.folder / file,
                place=place,
                dtype=torch.float32 if len(place.shape) == 1 else kind,
                num_heads=turned_heads(name.rpartition(".")[0], config, arch),
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """One tensor, as ``GGUFWriter.write_tensor_data`` asks of an array: it has a size, and writes.

    The bytes are torch's own: GGUF's float16 and bfloat16 are rounded as torch rounds.
    """

    name: str
    file: Path
    place: Place
    dtype: torch.dtype
    num_heads: int | None
    """Whose rows are in another order in GGUF."""

    @property
    def nbytes(self) -> int:
        """In the file that is written."""
        return math.prod(self.place.shape) * self.dtype.itemsize

    def tofile(self, target: BinaryIO) -> None:
        """Write some rows, or heads, after the others."""
        memory = Memory()
        with self.file.open("rb", buffering=0) as stream:
            for rows in self._parts():
                found = read_rows(stream, self.place, rows, memory=memory).to(self.dtype)
                if self.num_heads is not None:
                    found = turn_heads(found, len(found) * self.num_heads // self.place.num_rows)
                target.write(bytes_of(found.contiguous()))

    def _parts(self) -> Iterator[slice]:
        if self.num_heads is None:
            yield from row_chunks(self.place)
            return
        size = self.place.num_rows // self.num_heads
        for start in range(0, self.place.num_rows, size):
            yield slice(start, start + size)
