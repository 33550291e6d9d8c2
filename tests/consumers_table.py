"""``docs/consumers.md``: what each consumer takes of an adapter, written from the table of rules.

Run ``python -m tests.consumers_table`` to write it; a test compares the file with what this would
write.
"""

from pathlib import Path

from tplora.artifact.consumers import CONSUMERS, KEPT, PARTS

PAGE = Path(__file__).parents[1] / "docs" / "consumers.md"

_WORDS = {"kept": "yes", "folded": "folded", "left out": "left out", "refused": "**refused**"}


def page_text() -> str:
    """The page."""
    names = [*CONSUMERS]
    rows = [
        f"| {what} | {' | '.join(_WORDS[_rule(name, part).verdict] for name in names)} |"
        for part, what in PARTS.items()
    ]
    return _PAGE.format(
        head=" | ".join(f"`{name}`" for name in names),
        line=" | ".join("---" for _ in names),
        rows="\n".join(rows),
        consumers="\n\n".join(_section(name) for name in names if CONSUMERS[name].rules),
    )


def _rule(name, part):
    return CONSUMERS[name].rules.get(part, KEPT)


def _section(name):
    consumer = CONSUMERS[name]
    lines = [f"### {consumer.title}", ""]
    for part, what in PARTS.items():
        rule = _rule(name, part)
        if rule is not KEPT:
            said = "" if rule.verdict == "kept" else f"{rule.verdict}: "
            lines.append(f"- {what}: {said}{rule.why} (`{rule.source}`)")
    lines += [f"- {limit}" for limit in _limits(consumer)]
    if consumer.serve:
        command = consumer.serve.format(base="BASE", out="OUT", rank="RANK")
        lines += ["", "```text", command, "```"]
    return "\n".join(lines)


def _limits(consumer):
    if consumer.ranks:
        yield f"its largest rank can be set to {', '.join(map(str, consumer.ranks))}"
    if consumer.modules_source is not None:
        yield f"modules: `{consumer.modules}` (`{consumer.modules_source}`)"
    if consumer.model_types:
        yield f"bases: {', '.join(f'`{name}`' for name in consumer.model_types)}"
    for name, needed in consumer.needs.items():
        beside = " and ".join(f"`{one}`" for one in needed)
        yield f"`{name}` only with {beside} beside it (`{consumer.needs_source}`)"
    if consumer.every_layer:
        yield "a module that is adapted has to be adapted in every layer, else it is dropped in all"


_PAGE = """# What serves an adapter

Written by `python -m tests.consumers_table`.

```text
tplora export RUN --for vllm --out OUT
```

checks the adapter without the program that is to take it, by the rules that its source has at the
commit named, and writes the folder OUT as it takes it. If one part would be refused, or skipped
without a word, nothing is written: every reason is said, and the command that merges instead. PEFT
and transformers are tried in tplora's tests; the others' rules are read, not tried there. What
adapts modules that the base does not have is refused for all.

In December 2026 the verdicts were held once to the programs' own code, on adapters of a tiny Llama.
vLLM 0.33.0's `PEFTHelper` and `LoRAModel.from_local_checkpoint`, 14 kinds: it takes all that is
written here and computes the adapter's deltas to 3e-8, and of what is refused here it takes nothing
as it is; it has come to read `rank_pattern` itself. llama.cpp's `convert_lora_to_gguf.py`, as
llama-cpp-python 0.3.36 carries it, 9 kinds: the same tensors' names, and deltas bit for bit, for
plain factors, those of an embedding and of a head; it refuses `modules_to_save` and rows of tokens,
too; rsLoRA and patterns it takes and gives another scaling, without a word: write these here.

**yes**: as it is. **folded**: written another way with the same product, B in float32 where its
scaling would round it: one rank, filled up with zeros, and one alpha. **left out**: a copy of the
base's own weight, which is used anyway. **refused**: see the reason below.

| part of an adapter | {head} |
| --- | {line} |
{rows}

An adapter that brings more tokens than its base has is refused by all but PEFT and transformers:
merge it. `--dtype float16` or `bfloat16` rounds what is written.

For llama.cpp OUT holds `adapter.gguf`, in float32 if nothing else is asked, with the rows of q and
k of Llama and Mistral in llama.cpp's order.

```text
tplora export RUN --merged OUT.gguf
```

merges into one GGUF file, of Llama, Mistral, Qwen2 and Qwen3: the merge is made beside OUT.gguf,
which takes room for both, and goes. `transformers` reads it back with the merged folder's own
logits (`from_pretrained(FOLDER, gguf_file="OUT.gguf")`), but for two things that its reader leaves
out and llama.cpp's does not: the scaled frequencies of Llama 3.1 and later, and a Qwen3 whose heads
are not 128 wide. Any other scaled rotary embedding, a window of attention, biases of Llama, and a
tokenizer that is not a byte-level BPE which splits text as GPT-2, Llama 3, Qwen2 or SmolLM are
refused by name: merge into a folder, and convert that with llama.cpp's own `convert_hf_to_gguf.py`.

## Rules and where they were read

{consumers}
"""


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
