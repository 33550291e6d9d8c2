"""The published table of architectures: rows from a run of the zoo, and its two written forms.

    python -m tests.zoo.table            # runs the zoo and writes both files; takes some minutes

``tests/zoo/test_zoo.py`` holds each row to its own run, and the page to the rows.
"""

import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

from transformers import AutoConfig

from tests.world import World
from tests.zoo.build import architectures, build_model
from tests.zoo.packing import stays_apart
from tests.zoo.parity import deviations, everything
from tplora.plan.architectures import Architecture, proven_classes
from tplora.plan.facts import read_facts
from tplora.plan.packing import PROVEN_ATTENTION
from tplora.plan.style import STYLES
from tplora.upstream import build_meta_model

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "tplora/plan/proven.json", ROOT / "docs/models.md"
FLOAT64 = 1e-9
"""Largest relative difference where weights and factors are float64, all of them."""
FLOAT32 = {"later gradient": 1e-4, "factor": 1e-4}
"""Where some weights stay float32: after a step, parameters differ by rounding already."""
FLOAT32_FIRST = 1e-5
AT_FOUR = (
    "apertus", "cohere2", "deepseek_v2", "deepseek_v3", "exaone4", "gemma", "gemma2",
    "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "granite", "kimi_linear", "llama",
    "llama4_text", "minimax_m2", "mistral", "mixtral", "nemotron", "olmo2", "olmo3", "phi3",
    "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "starcoder2",
)  # fmt: skip
"""Families people use, in a wider config as well, over four ranks."""
OFTEN_AT_FOUR = (
    "deepseek_v2", "gpt_oss", "phi3",
)  # fmt: skip
"""Latent attention, experts, fused weights; the others take four ranks only in the slow tests."""


def is_within(worst: dict[str, tuple[float, str]], precision: str) -> bool:
    """Whether every deviation is one of rounding."""
    if precision == "float64":
        return all(error <= FLOAT64 for error, _ in worst.values())
    return all(error <= FLOAT32.get(kind, FLOAT32_FIRST) for kind, (error, _) in worst.items())


def describe(model_type: str, config, precision: str, *, packs: bool) -> Architecture:
    """The row of one architecture, but for what was measured read from config and plan."""
    model = build_meta_model(config, trust_remote_code=False)
    facts = read_facts(model)
    stacks = facts.with_role("experts")
    is_cut = any(STYLES["parameter"][p.style].weight_shard_dim is not None for p in stacks)
    output = model.get_output_embeddings()
    head = next(m for m in facts.modules if model.get_submodule(m.name) is output)
    adapted = set(everything(config).target_modules)
    linears = {m.name for m in facts.modules if m.kind == "linear"}
    return Architecture(
        model_type=model_type,
        precision=precision,
        experts=None if not stacks else "cut" if is_cut else "whole",
        head="whole" if head.style is None else "cut",
        not_adapted=tuple(sorted({name.rpartition(".")[2] for name in linears - adapted})),
        packs=packs,
        tp_sizes=(2, 4) if model_type in AT_FOUR else (2,),
    )


def rows_text(rows, classes) -> str:
    """``proven.json``: one line per architecture."""
    exact = [
        f"    {json.dumps(row.model_type)}: "
        + json.dumps({name: getattr(row, name) for name in row.__slots__ if name != "model_type"})
        for row in rows
    ]
    classes_ = [f"    {json.dumps(name)}: {json.dumps(texts)}" for name, texts in classes.items()]
    written = [",\n".join(lines) for lines in (exact, classes_)]
    return _DOCUMENT.format(*written)


_DOCUMENT = """\
{{
  "architectures": {{
{}
  }},
  "classes": {{
{}
  }}
}}
"""


def page_text(rows, classes) -> str:
    """``docs/models.md``."""
    table = [
        f"| {row.model_type} | exact | {', '.join(map(str, row.tp_sizes))} | {row.precision} "
        f"| {row.experts or '-'} | {row.head} | {'apart' if row.packs else 'refused'} "
        f"| {', '.join(row.not_adapted) or '-'} |"
        for row in rows
    ]
    held = [f"| {name} | {', '.join(texts)} |" for name, texts in classes.items()]
    return "\n".join([_HEAD.format(num=len(rows)), *table, _CLASSES, *held]) + "\n"


_HEAD = """\
# Models

Written by `python -m tests.zoo.table` from a run of the tests; `tplora models` prints it.

Each of these {num} architectures, which are all those that transformers 5.24 can cut for causal
language modelling, was trained as a tiny random model with an adapter on every linear layer,
embedding, head, router and stack of experts, at the tp sizes named, and held to plain PEFT in one
process: loss, every gradient, three AdamW steps, the saved adapter read back by plain PEFT, the
merged model; with padding, with an odd batch, with ranks that were seeded differently.

- **precision**: what the comparison was made in. `float64`: everything, also what the model's code
  casts to float32, and equal to 1e-9. `float32`: transformers keeps the router's weights in
  float32, and so are their factors; equal to 1e-5 at equal parameters.
- **experts**: the weights of the experts are `cut`, or `whole` on every rank.
- **head**: the output embedding is `cut` on the vocabulary, or `whole`.
- **joined rows**: with `packing` or `padding_free`, rows that are joined into one sequence stay
  `apart`: logits and every gradient are those of each row alone, to 1e-9 in float64, with the
  attentions eager and sdpa. The others let a row read those before it, or carry a state from token
  to token, and are `refused` by name; so are the classes below, and other attentions.
- **not adapted**: layers that peft refuses to adapt, or could not read back, in one process too.

What is not in these tables is refused by name before weights load.

| model type | at tp_size > 1 | proven at | precision | experts | head | joined rows | not adapted |
| --- | --- | --- | --- | --- | --- | --- | --- |"""
_CLASSES = """
## Text models inside other classes

Checkpoints of these classes train on rows of text.

| model type | text model |
| --- | --- |"""


def _unproven_deviations(path: str, packs: bool) -> dict[str, tuple[float, str]]:
    with mock.patch("tplora.plan.build.architecture_problem", return_value=None):
        return deviations(path, 2, packs=packs)


def main() -> None:
    """Run the zoo at two ranks and write both files; a wrong number ends it."""
    rows = []
    with World(2) as world:
        for model_type in architectures():
            with tempfile.TemporaryDirectory() as folder:
                build_model(model_type).save_pretrained(folder)
                kinds = [stays_apart(model_type, kind) for kind in PROVEN_ATTENTION]
                packs = all(kind is not False for kind in kinds)
                worst = world.run(_unproven_deviations, folder, packs)[0]
                config = AutoConfig.from_pretrained(folder)
            joined = worst.pop("joined", (0.0, ""))[0]
            precision = "float64" if is_within(worst, "float64") else "float32"
            assert is_within(worst, precision), f"{model_type}: {worst}"
            packs = packs and joined <= (FLOAT64 if precision == "float64" else FLOAT32_FIRST)
            rows.append(describe(model_type, config, precision, packs=packs))
            sys.stderr.write(f"{model_type} {precision}\n")
    ROWS.write_text(rows_text(rows, proven_classes()), encoding="utf-8")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page_text(rows, proven_classes()), encoding="utf-8")


if __name__ == "__main__":
    main()
