"""Export for a consumer: what a person named, held against its rules and written as it takes it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import AutoConfig

from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.adapter_fit import check_is_in_base
from tplora.artifact.checkpoint import find_base_folder
from tplora.artifact.consumer_form import write_for
from tplora.artifact.consumers import CONSUMERS
from tplora.errors import ArtifactError
from tplora.plan.facts import read_facts
from tplora.run.export import DTYPES, find_parts
from tplora.upstream import build_meta_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PretrainedConfig

    from tplora.artifact.adapter_dir import AdapterFiles

__all__ = ["Exported", "export_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    title: str
    """Of the consumer."""
    changes: tuple[str, ...]
    serve: str
    """The command that takes it, or nothing where Python does."""


def export_for(
    named: str,
    consumer: str,
    out: Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda message: None,
) -> Exported:
    """Write an adapter for a consumer.

    Args:
        named: A run's folder, an adapter's folder, or a hub id of one.
        consumer: One of ``CONSUMERS``.
        out: The folder to be.
        base: Folder or hub id; what the run or the adapter names when left out.
        dtype: Of what is written.
        overwrite: Replace what ``out`` holds.
        progress: Called with one line before each long step.

    Raises:
        ArtifactError: If the consumer would not take the adapter, with every reason and what to do
            instead, or the adapter or its base cannot be found.
    """
    if consumer not in CONSUMERS:
        known = ", ".join(CONSUMERS)
        raise ArtifactError(f"--for {consumer}: is none of {known}; choose one of them")
    _check_dtype(consumer, dtype)
    parts = find_parts(named, base=base, progress=progress)
    adapter = read_adapter(parts.adapter)
    config = AutoConfig.from_pretrained(parts.base.path, revision=parts.base.revision)
    check_is_in_base(adapter, _weight_names(config))
    of_base = "" if base is None else f" --base {shlex.quote(base)}"
    merged = shlex.quote(f"{out}-merged")
    copies_of = None  # of a hub's base, the weights are fetched only if they are asked for
    if adapter.saved_bases:
        copies_of = find_base_folder(parts.base.path, revision=parts.base.revision)
    fit = write_for(
        adapter,
        consumer,
        config.get_text_config(),
        out,
        base_folder=copies_of,
        dtype=None if dtype is None else DTYPES[dtype],
        overwrite=overwrite,
        merge_command=f"tplora export {shlex.quote(named)}{of_base} --merged {merged}",
    )
    serve = CONSUMERS[consumer].serve.format(
        base=shlex.quote(parts.base.path), out=shlex.quote(str(out)), rank=_room(consumer, adapter)
    )
    return Exported(title=CONSUMERS[consumer].title, changes=fit.changes, serve=serve)


def _weight_names(config: PretrainedConfig) -> set[str]:
    """Of the model that the base's config makes, without its weights."""
    facts = read_facts(build_meta_model(config, trust_remote_code=False))
    return {one.name for one in facts.parameters} | {f"{one.name}.weight" for one in facts.modules}


def _check_dtype(consumer: str, dtype: str | None) -> None:
    known = [*DTYPES] if CONSUMERS[consumer].writes == "peft" else [*DTYPES][1:]
    if dtype is not None and dtype not in known:
        raise ArtifactError(f"--dtype {dtype}: is none of {', '.join(known)}; choose one of them")


def _room(consumer: str, adapter: AdapterFiles) -> int:
    """The smallest of the consumer's ranks that holds the adapter's."""
    rank = max((adapter.shapes[pair.b][1] for pair in adapter.pairs), default=1)
    return next((room for room in CONSUMERS[consumer].ranks if room >= rank), rank)
