"""The model card beside a saved adapter or a merged model: what it is, how it came, how to load it.

A card is read elsewhere: no path of the machine that trained it stands in one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from huggingface_hub import ModelCardData

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from peft import LoraConfig

__all__ = ["card_text", "is_hub_id", "merged_card_text", "public_name"]

_NUMBER = re.compile(r"\.\d+\.")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.\-]{0,60}")

_ADAPTER_USE = """```python
from peft import PeftModel
from transformers import {imports}

base = {auto_class}.from_pretrained({arguments})
model = PeftModel.from_pretrained(base, "this/folder")
```

Trained with tplora, tensor-parallel; an ordinary PEFT adapter with full shapes."""

_MERGED_USE = """```python
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("this/folder")
tokenizer = AutoTokenizer.from_pretrained("this/folder")
```

Base and adapter in one, merged with tplora; an ordinary model, without PEFT."""


def card_text(
    config: LoraConfig,
    facts: Mapping[str, str],
    *,
    auto_class: str = "AutoModelForCausalLM",
    quantization: Sequence[str] = (),
    details: Mapping[str, str] | None = None,
    license_name: str | None = None,
) -> str:
    """A card from the adapter's config and what is known of its training.

    Args:
        config: PEFT's config, with ``base_model_name_or_path``.
        facts: Further rows of the table, such as the last evaluation loss.
        auto_class: What of transformers loads the base.
        quantization: Arguments of ``BitsAndBytesConfig``, one a line, if it is quantised then.
        details: Title to text, such as the recipe and the plan.
        license_name: The base's, if it is known.
    """
    use = _ADAPTER_USE.format(
        auto_class=auto_class,
        imports=", ".join([auto_class, *(["BitsAndBytesConfig"] if quantization else [])]),
        arguments=_arguments(_base_name(config), quantization),
    )
    head = _front_matter(config, "adapter", "peft", license_name)
    title = f"LoRA adapter for {_base_name(config)}"
    return _card(head, title, _rows(config) | dict(facts), details or {}, use)


def merged_card_text(
    config: LoraConfig,
    facts: Mapping[str, str],
    *,
    auto_class: str = "AutoModelForCausalLM",
    details: Mapping[str, str] | None = None,
    license_name: str | None = None,
) -> str:
    """A card of the model that base and adapter make; the arguments are ``card_text``'s."""
    use = _MERGED_USE.format(auto_class=auto_class)
    head = _front_matter(config, "finetune", "transformers", license_name)
    title = f"{_base_name(config)} with a LoRA adapter merged in"
    return _card(head, title, _rows(config) | dict(facts), details or {}, use)


def public_name(name: str) -> str:
    """A model's name as it means something elsewhere: of a folder its last part."""
    if is_hub_id(name) or name.startswith("pypi:"):
        return name
    return re.split(r"[/\\]", name.rstrip("/\\"))[-1] or "a local folder"


def is_hub_id(base: str) -> bool:
    """Whether a hub would know it: ``owner/name``. A path or a wheel means nothing elsewhere."""
    return re.fullmatch(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", base) is not None


def _front_matter(config: LoraConfig, relation: str, library: str, license_name: str | None) -> str:
    base = config.base_model_name_or_path or ""
    is_known = license_name is not None and _LICENSE.fullmatch(license_name)
    data = ModelCardData(
        base_model=base if is_hub_id(base) else None,
        base_model_relation=relation if is_hub_id(base) else None,
        library_name=library,
        license=license_name if is_known else None,
        pipeline_tag="text-generation",
        tags=["lora", "tplora"],
    )
    return str(data.to_yaml())


def _card(
    head: str, title: str, rows: Mapping[str, str], details: Mapping[str, str], use: str
) -> str:
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {k} | {v} |" for k, v in rows.items())])
    blocks = [f"---\n{head}\n---", f"# {title}", table, "## Use", use]
    blocks += [
        f"## {title}\n\n```{'toml' if title == 'Recipe' else ''}\n{text.rstrip()}\n```"
        for title, text in details.items()
    ]
    return "\n\n".join(blocks) + "\n"


def _rows(config: LoraConfig) -> dict[str, str]:
    modules = config.target_modules or ()
    named = modules if isinstance(modules, str) else _without_layers(modules)
    parameters = _without_layers(config.target_parameters or ())
    return {
        "base": f"`{_base_name(config)}`",
        "r": str(config.r),
        "lora_alpha": str(config.lora_alpha),
        "lora_dropout": str(config.lora_dropout),
        "adapted modules": named or "none",
        **({"adapted parameters": parameters} if parameters else {}),
    }


def _base_name(config: LoraConfig) -> str:
    return public_name(config.base_model_name_or_path or "its base model")


def _arguments(base: str, quantization: Sequence[str]) -> str:
    if not quantization:
        return repr(base)
    lines = [f"        {line}" for line in quantization]
    start = f"\n    {base!r},\n    quantization_config=BitsAndBytesConfig(\n"
    return start + "\n".join(lines) + "\n    ),\n"


def _without_layers(names: Iterable[str]) -> str:
    """Each kind of name once; a saved config may spell out every layer."""
    return ", ".join(sorted({_NUMBER.sub(".*.", name) for name in names}))
