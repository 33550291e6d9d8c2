"""A GGUF file of a two-layer Llama, and a wheel around it, made in milliseconds."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np

HIDDEN, FFN, HEADS, KV_HEADS, LAYERS = 32, 48, 4, 2, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
)


def byte_tokens():
    """The 256 characters that byte-level BPE writes bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (256 + k for k in range(256))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def write_gguf(path, *, seed=0, tokenizer=True):
    """Write the file and return its embedding as float32 numbers."""
    rng = np.random.default_rng(seed)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "Ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3, 3] + [1] * 257)
        writer.add_token_merges(["A b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHAT_TEMPLATE)
    tensors = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for k in range(LAYERS):
        tensors |= {
            f"blk.{k}.attn_norm": (HIDDEN,),
            f"blk.{k}.ffn_norm": (HIDDEN,),
            f"blk.{k}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{k}.attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{k}.attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            f"blk.{k}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{k}.ffn_gate": (FFN, HIDDEN),
            f"blk.{k}.ffn_up": (FFN, HIDDEN),
            f"blk.{k}.ffn_down": (HIDDEN, FFN),
        }
    values = {
        name: rng.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()
    }
    for name, value in values.items():
        writer.add_tensor(f"{name}.weight", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values["token_embd"]


def write_wheel(folder, *, name="tiny_model", version="1.0", files):
    """Write a wheel that holds ``files`` (name inside to path); return its path and sha256."""
    info = f"{name}-{version}.dist-info"
    wheel = Path(folder, f"{name}-{version}-py3-none-any.whl")
    with zipfile.ZipFile(wheel, "w") as archive:
        for inside, path in files.items():
            archive.write(path, f"{name}/{inside}")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()
