"""Why a consumer would refuse an adapter, or not do what PEFT does with it: found before it does.

A server that skips what it does not know serves another model, and says nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tplora.artifact.consumers import CONSUMERS, KEPT, PARTS
from tplora.artifact.mergeable import INITS_THAT_LEAVE_THE_BASE
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tplora.artifact.adapter_dir import AdapterFiles
    from tplora.artifact.consumers import Consumer

__all__ = ["BaseFacts", "Fit", "check_fit", "find_parts_held"]

_LAYER = re.compile(r"(.*\.layers\.)(\d+)(\..*)")


class BaseFacts(Protocol):
    """What is read of the base's text config."""

    model_type: str
    num_hidden_layers: int
    vocab_size: int
    tie_word_embeddings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How an adapter fits a consumer."""

    reasons: tuple[str, ...]
    """Why it does not; empty if it does."""
    changes: tuple[str, ...]
    """What will be written another way, with the same product."""


def check_fit(adapter: AdapterFiles, name: str, base: BaseFacts) -> Fit:
    """Hold an adapter against the rules of a consumer.

    Args:
        adapter: A checked adapter.
        name: Of the consumer, as in ``CONSUMERS``.
        base: The text config of the model it belongs to.

    Raises:
        ArtifactError: If there is no such consumer.
    """
    if name not in CONSUMERS:
        raise ArtifactError(f"--for {name}: is none of {', '.join(CONSUMERS)}; choose one of them")
    consumer = CONSUMERS[name]
    reasons, changes = [], []
    for part, example in find_parts_held(adapter).items():
        rule = consumer.rules.get(part, KEPT)
        if rule.verdict == "refused":
            reasons.append(f"it holds {PARTS[part]}, as {example}: {rule.why} ({rule.source})")
        elif rule.verdict != "kept":
            changes.append(f"{rule.verdict}: {PARTS[part]}")
    reasons += [*_limits(adapter, consumer), *_base_limits(adapter, consumer, base)]
    return Fit(reasons=tuple(reasons), changes=tuple(changes))


def find_parts_held(adapter: AdapterFiles) -> dict[str, str]:
    """Every part of ``PARTS`` that the adapter holds, with an example of it."""
    found: dict[str, str] = {}
    for part, example in _parts(adapter):
        found.setdefault(part, example)
    return found


def _parts(adapter: AdapterFiles) -> Iterator[tuple[str, str]]:
    config = adapter.config
    yield from _parts_of_pairs(adapter)
    if config.use_rslora:
        yield "rslora", "use_rslora"
    if config.use_bdlora:
        yield "blocks", "use_bdlora"
    if config.init_lora_weights not in INITS_THAT_LEAVE_THE_BASE:
        yield "other_base", f"init_lora_weights = {config.init_lora_weights!r}"
    if config.alora_invocation_tokens:
        yield "activated", "alora_invocation_tokens"
    for key in adapter.saved_bases.values():
        yield "saved_base", key
    for key in adapter.trained_tokens.values():
        yield "tokens", key
    for key in adapter.others.values():
        yield ("bias" if key.endswith(".bias") else "whole"), key


def _parts_of_pairs(adapter: AdapterFiles) -> Iterator[tuple[str, str]]:
    ranks = {adapter.shapes[pair.b][1] // pair.num_matrices for pair in adapter.pairs}
    scalings = {pair.scaling for pair in adapter.pairs}
    if len(ranks) > 1 or len(scalings) > 1 or ranks - {adapter.config.r}:
        yield "patterns", adapter.pairs[0].module
    for pair in adapter.pairs:
        if pair.is_embedding:
            yield "embedding", pair.a
        elif not any(part.isdigit() for part in pair.module.split(".")):
            yield "head", pair.a
        if pair.magnitude is not None:
            yield "dora", pair.magnitude
        if pair.bias is not None:
            yield "lora_bias", pair.bias
        if pair.num_matrices > 1 or adapter.config.target_parameters:
            yield "experts", pair.a


def _limits(adapter: AdapterFiles, consumer: Consumer) -> Iterator[str]:
    rank = max((adapter.shapes[pair.b][1] for pair in adapter.pairs), default=0)
    if consumer.ranks and rank > consumer.ranks[-1]:
        yield f"its rank is {rank}: the largest that can be set is {consumer.ranks[-1]}"
    unknown = [p.module for p in adapter.pairs if not re.fullmatch(consumer.modules, p.module)]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        where = consumer.modules_source
        yield f"it adapts {unknown[0]}{more}: no such module is looked up ({where})"
    yield from _missing_beside(adapter, consumer)
    if not adapter.pairs and consumer.title not in ("PEFT", "transformers' load_adapter"):
        yield "it holds no factors"


def _base_limits(adapter: AdapterFiles, consumer: Consumer, base: BaseFacts) -> Iterator[str]:
    if consumer.model_types and base.model_type not in consumer.model_types:
        known = ", ".join(consumer.model_types)
        yield f"the base is {base.model_type!r}: its names are known for {known} alone"
    if consumer.every_layer:
        yield from _missing_layers(adapter, base.num_hidden_layers)
    left_out = consumer.rules.get("saved_base", KEPT).verdict == "left out"
    rows = [adapter.shapes[key][0] for key in adapter.saved_bases.values()]
    rows += [p.weight_shape[0] for p in adapter.pairs if p.is_embedding]
    other = next((n for n in rows if n != base.vocab_size), None)
    if left_out and other is not None:
        yield f"it has {other} tokens, the base has {base.vocab_size}: an adapter cannot add tokens"
    held = find_parts_held(adapter)
    if consumer.writes == "gguf" and base.tie_word_embeddings:
        for part in {"head", "embedding"} & held.keys():
            yield f"it holds {PARTS[part]}, tied in the base: one tensor is both, and takes neither"


def _missing_beside(adapter: AdapterFiles, consumer: Consumer) -> Iterator[str]:
    modules = {pair.module for pair in adapter.pairs}
    said = set()
    for module in sorted(modules):
        owner, _, name = module.rpartition(".")
        for needed in consumer.needs.get(name, ()):
            if f"{owner}.{needed}" not in modules and (name, needed) not in said:
                said.add((name, needed))
                yield (
                    f"{module} is adapted and {needed} beside it is not: they are stacked, which "
                    f"fails without it ({consumer.needs_source})"
                )


def _missing_layers(adapter: AdapterFiles, num_layers: int) -> Iterator[str]:
    """TGI stacks the layers of a kind, and drops a kind that is not in every layer."""
    kinds: dict[str, set[int]] = {}
    for pair in adapter.pairs:
        if match := _LAYER.fullmatch(pair.module):
            kinds.setdefault(match[1] + "*" + match[3], set()).add(int(match[2]))
    for kind, layers in kinds.items():
        if missing := sorted(set(range(num_layers)) - layers):
            yield f"{kind} is not adapted in layer {missing[0]}: such modules are dropped in all"
