"""A recipe's tokenizer and configs, with the tokens that it adds to the model.

    [model] add_tokens = ["<call>"]  ->  tokenizer, vocab_size, trainable_token_indices

Rows of new tokens mean nothing before they are trained, and a file has to bring them along. So they
are trained as PEFT trains single tokens, in the embedding and in a head that is not tied to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer

from tplora.errors import RecipeError
from tplora.plan.lora import build_lora_config, started_from
from tplora.upstream import build_meta_model

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from peft import LoraConfig
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from tplora.base.source import ModelSource
    from tplora.recipe.schema import Recipe

__all__ = ["AdapterSetup", "load_tokenizer", "set_up_adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSetup:
    """What is planned, and later loaded and attached."""

    config: PretrainedConfig
    """The model's, with as many tokens as it is going to have."""
    lora: LoraConfig
    num_tokens: int | None
    """Rows of embedding and head; None where the base's stay."""


def load_tokenizer(recipe: Recipe, source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, or of the adapter that is started from, with the added tokens.

    Raises:
        RecipeError: If a token that is to be added is there already.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        _tokenizer_folder(recipe) or source.path, trust_remote_code=recipe.model.trust_remote_code
    )
    new = recipe.model.add_tokens or []
    known = [token for token in new if token in tokenizer.get_vocab()]
    if known:
        raise RecipeError(
            [
                f"model.add_tokens: the tokenizer has {', '.join(map(repr, known))} already; leave "
                "them out, and name their ids in lora.trainable_token_indices to train them"
            ]
        )
    if new:
        tokenizer.add_tokens(list(new))
    return tokenizer


def _tokenizer_folder(recipe: Recipe) -> Path | None:
    """Where an adapter that is started from keeps its tokenizer, if it has one."""
    start = recipe.lora.get("adapter_name_or_path")
    folder = None if start is None else started_from(start)
    has_own = folder is not None and (folder / "tokenizer_config.json").is_file()
    return folder if has_own else None


def set_up_adapter(recipe: Recipe, source: ModelSource) -> AdapterSetup:
    """The model's config and the adapter's, as the recipe and its tokens want them.

    A tokenizer is read only where it has other tokens than the model's own.

    Raises:
        PlanError: If the adapter's config cannot be had.
    """
    trust = recipe.model.trust_remote_code
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=trust)
    lora = build_lora_config(recipe.lora, config, trust_remote_code=trust)
    if recipe.model.add_tokens is None and _tokenizer_folder(recipe) is None:
        return AdapterSetup(config=config, lora=lora, num_tokens=None)
    tokenizer = load_tokenizer(recipe, source)
    new = tokenizer.convert_tokens_to_ids(list(recipe.model.add_tokens or ()))
    num_tokens, text = len(tokenizer), config.get_text_config()
    is_grown = num_tokens > text.vocab_size
    if is_grown:
        # A tokenizer may have had tokens without a row before; every new row has to be saved.
        new = sorted({*new, *range(text.vocab_size, num_tokens)}) if new else new
        text.vocab_size = num_tokens
    if new:
        names = _row_modules(config, trust_remote_code=trust)
        lora.trainable_token_indices = _with_tokens(lora, names, new)
    return AdapterSetup(config=config, lora=lora, num_tokens=num_tokens if is_grown else None)


def _row_modules(config: PretrainedConfig, *, trust_remote_code: bool) -> list[str]:
    """The last names of the embedding, and of the head if it has rows of its own."""
    model = build_meta_model(config, trust_remote_code=trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    is_own = head is not None and head.weight is not embedding.weight
    return [names[id(embedding)], *([names[id(head)]] if is_own else [])]


def _with_tokens(lora: LoraConfig, names: list[str], new: Collection[int]) -> dict[str, list[int]]:
    """PEFT's ``trainable_token_indices``: what was asked for, and the new tokens everywhere."""
    asked: Any = lora.trainable_token_indices or {}
    found: dict[str, Any] = dict(asked) if isinstance(asked, dict) else {names[0]: asked}
    for name in names:
        if name not in (lora.modules_to_save or ()):  # there every row is trained
            found[name] = [*found.get(name, ()), *new]
    return {name: list(tokens) for name, tokens in found.items() if tokens}
