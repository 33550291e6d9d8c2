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
        RecipeError: If new tokens would be trained in one of two modules that are tied.
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
        names, is_tied = _row_modules(config, trust_remote_code=trust)
        if is_tied:
            _check_tied(lora, names)
        lora.trainable_token_indices = _with_tokens(lora, names, new, is_tied=is_tied)
    return AdapterSetup(config=config, lora=lora, num_tokens=num_tokens if is_grown else None)


def _row_modules(config: PretrainedConfig, *, trust_remote_code: bool) -> tuple[list[str], bool]:
    """The embedding, and the head if the model has one; whether they are one weight."""
    model = build_meta_model(config, trust_remote_code=trust_remote_code)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(module): name for name, module in model.named_modules()}
    if head is None:
        return [names[id(embedding)]], False
    return [names[id(embedding)], names[id(head)]], head.weight is embedding.weight


def _is_named(name: str, entries: Any) -> bool:
    """By PEFT's rule: an entry is the end of a module's name."""
    return any(name.endswith(entry) for entry in entries or ())


def _check_tied(lora: LoraConfig, names: list[str]) -> None:
    """A copy of one half alone would leave the other's new rows untrained and out of the file."""
    saved = [name for name in names if _is_named(name, lora.modules_to_save)]
    if len(saved) == 1 and not lora.ensure_weight_tying:
        raise RecipeError(
            [
                f"model.add_tokens: lora.modules_to_save names {saved[0]} and not what it is tied "
                f"to; set lora.ensure_weight_tying = true, or name both ({' and '.join(names)})"
            ]
        )


def _with_tokens(
    lora: LoraConfig, names: list[str], new: Collection[int], *, is_tied: bool
) -> dict[str, list[int]]:
    """PEFT's ``trainable_token_indices``: what was asked for, and the new tokens everywhere.

    A tied head follows the embedding, unless it was given tokens of its own.
    """
    asked: Any = lora.trainable_token_indices or {}
    found: dict[str, Any] = dict(asked) if isinstance(asked, dict) else {names[0]: asked}
    saved = [name for name in names if _is_named(name, lora.modules_to_save)]
    if is_tied and not _is_named(names[1], found):
        names = names[:1]
    for name in names:
        # Where the module is trained whole, every row is; with ensure_weight_tying so is the head.
        if name not in saved and not (is_tied and saved):
            entry = next((entry for entry in found if name.endswith(entry)), name)
            found[entry] = list(dict.fromkeys([*found.get(entry, ()), *new]))
    return {name: list(tokens) for name, tokens in found.items() if tokens}
