"""``docs/scaling.md``: what goes over each axis, of a small model and of a large one.

Run ``python -m tests.scaling_table`` to write it; a test compares the file with what this would
write, and each row of the small model with the real step (``tests/rehearsal/test_traffic.py``).
"""

import tempfile
from pathlib import Path

from peft import LoraConfig
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from tests.rehearsal.models import lora, write_model
from tplora.plan.axes import Axes
from tplora.plan.build import build_plan
from tplora.plan.size import format_size
from tplora.plan.step_cost import Batch
from tplora.plan.step_report import peak_bytes
from tplora.plan.traffic import step_traffic
from tplora.rehearsal.step import rehearse

PAGE = Path(__file__).parents[1] / "docs" / "scaling.md"

BATCH = Batch(rows=2, length=24, is_checkpointed=False)
MESHES = (
    Axes(tp_size=1),
    Axes(tp_size=2),
    Axes(tp_size=1, fsdp_size=2),
    Axes(tp_size=1, dp_replicate_size=2),
    Axes(tp_size=1, fsdp_size=3),
    Axes(tp_size=1, dp_replicate_size=3),
    Axes(tp_size=4),
    Axes(tp_size=2, fsdp_size=2),
    Axes(tp_size=2, dp_replicate_size=2),
    Axes(tp_size=1, fsdp_size=2, dp_replicate_size=2),
)
"""Over 1 to 4 processes."""

LARGE_BATCH = Batch(rows=2, length=8192, is_checkpointed=True, is_accumulated=True)
NUM_MICRO_BATCHES = 8
LARGE_MESHES = (
    Axes(tp_size=8),
    Axes(tp_size=8, fsdp_size=8),
    Axes(tp_size=8, fsdp_size=2, dp_replicate_size=4),
    Axes(tp_size=8, dp_replicate_size=8),
)
"""One machine of 8 GPUs, and 8 of them."""

_TOP = """# What goes over each axis

`tplora plan` says it of any recipe ([cost.md](cost.md)): of an optimizer step, what rank 0 gives to
each collective; of the base, what is gathered for it. `python -m tests.scaling_table` writes this.

`tp` carries activations and their gradients, and without data axes the sum of gradients that each
rank has a part of. With data axes `world` carries the gradients of replicated factors, `data` those
of cut ones, and `fsdp` the frozen base. Only forward and backward of `tp` grow with the tokens.

## Over 1 to 4 processes: predicted, and measured to be equal

A Llama of 2 layers and float32 ({size}), LoRA of r = 8 on every linear, {rows} x {length} tokens.
"""

_LARGE = """
## Over 8 x 8 GPUs: predicted, not run

A Llama of 70 billion parameters in bfloat16, LoRA of r = 64 on every linear, {micro} micro-batches
of {rows} x {length:,} tokens on each data rank, activation checkpointing (backward repeats what
forward says). `tp` stays inside a machine of 8 GPUs; the other axes go between machines.
"""

_HEAD = """| processes | axes | axis | what | collectives | {unit} |
| ---: | --- | --- | --- | ---: | ---: |"""


def large_model() -> tuple[PreTrainedConfig, LoraConfig]:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config, LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM")


def predict(config: PreTrainedConfig, adapter: LoraConfig, batch: Batch, tp_size: int):
    plan = build_plan(config, adapter, tp_size=tp_size)
    return plan, rehearse(plan, config, adapter, batch)


def page_text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(write_model("llama", Path(folder)))
    found = {size: predict(config, lora(), BATCH, size) for size in {m.tp_size for m in MESHES}}
    top = _TOP.format(
        size=f"hidden {config.hidden_size}, vocabulary {config.vocab_size:,}",
        rows=BATCH.rows,
        length=BATCH.length,
    )
    lines = [top, _HEAD.format(unit="bytes")]
    for axes in MESHES:
        lines += rows_of(axes, step_traffic(*_of(found, axes), num_micro_batches=1))
    lines.append(
        _LARGE.format(micro=NUM_MICRO_BATCHES, rows=LARGE_BATCH.rows, length=LARGE_BATCH.length)
    )
    large = {8: predict(*large_model(), LARGE_BATCH, 8)}
    lines.append(_HEAD.format(unit="size"))
    for axes in LARGE_MESHES:
        traffic = step_traffic(*_of(large, axes), num_micro_batches=NUM_MICRO_BATCHES)
        lines += rows_of(axes, traffic, size=format_size)
    peaks = [f"{format_size(peak_bytes(*_of(large, axes)))} with {axes}" for axes in LARGE_MESHES]
    lines.append(f"\nThe most that a rank takes: {'; '.join(peaks)}.")
    return "\n".join(lines) + "\n"


def _of(found, axes):
    plan, cost = found[axes.tp_size]
    return plan, axes, cost


def rows_of(axes, traffic, *, size="{:,}".format):
    """The lines of the table for one mesh."""
    shown = [f"| {t.axis} | {t.what} | {t.count:,} | {size(t.num_bytes)} |" for t in traffic]
    first = f"| {axes.world_size} | {axes} "
    return [
        (first if number == 0 else "| | ") + row
        for number, row in enumerate(shown or ["| | nothing | 0 | 0 |"])
    ]


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
