"""The model card beside a saved adapter: what it is, what it sits on, how to load it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peft import LoraConfig

__all__ = ["card_text", "is_hub_id"]

_NUMBER = re.compile(r"\.\d+\.")

_CARD = """---
library_name: peft
pipeline_tag: text-generation
{base_model}tags:
- lora
- tplora
---

# LoRA adapter for {base}

{table}

## Use

```python
from peft import PeftModel
from transformers import {imports}

base = {auto_class}.from_pretrained({arguments})
model = PeftModel.from_pretrained(base, "this/folder")
```

Trained with tplora, tensor-parallel; an ordinary PEFT adapter with full shapes.
"""


def card_text(
    config: LoraConfig,
    facts: Mapping[str, str],
    *,
    auto_class: str = "AutoModelForCausalLM",
    quantization: Sequence[str] = (),
) -> str:
    """A card from the adapter's config and what is known of its training.

    Args:
        config: PEFT's config, with ``base_model_name_or_path``.
        facts: Further rows of the table, such as the last evaluation loss.
        auto_class: What of transformers loads the base.
        quantization: Arguments of ``BitsAndBytesConfig``, one a line, if it is quantised then.
    """
    base = config.base_model_name_or_path or "its base model"
    modules = config.target_modules or ()
    named = modules if isinstance(modules, str) else _without_layers(modules)
    parameters = _without_layers(config.target_parameters or ())
    rows = {
        "base": f"`{base}`",
        "r": str(config.r),
        "lora_alpha": str(config.lora_alpha),
        "lora_dropout": str(config.lora_dropout),
        "adapted modules": named or "none",
        **({"adapted parameters": parameters} if parameters else {}),
        **facts,
    }
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())])
    return _CARD.format(
        base=base,
        auto_class=auto_class,
        imports=", ".join([auto_class, *(["BitsAndBytesConfig"] if quantization else [])]),
        arguments=_arguments(base, quantization),
        base_model=f"base_model: {base}\n" if is_hub_id(base) else "",
        table=table,
    )


def _arguments(base: str, quantization: Sequence[str]) -> str:
    if not quantization:
        return repr(base)
    lines = [f"        {line}" for line in quantization]
    start = f"\n    {base!r},\n    quantization_config=BitsAndBytesConfig(\n"
    return start + "\n".join(lines) + "\n    ),\n"


def _without_layers(names: Iterable[str]) -> str:
    """Each kind of name once; a saved config may spell out every layer."""
    return ", ".join(sorted({_NUMBER.sub(".*.", name) for name in names}))


def is_hub_id(base: str) -> bool:
    """Whether a hub would know it: ``owner/name``. A path or a wheel means nothing elsewhere."""
    owner, slash, name = base.partition("/")
    return bool(owner and slash and name) and "/" not in name and not set(":\\~ ") & set(base)
