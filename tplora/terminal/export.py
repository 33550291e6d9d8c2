"""``tplora export``, as it is asked for and as it is answered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tplora.artifact.push import check_repo, push_folder
from tplora.run.card import write_merged_card
from tplora.run.consumers import export_for
from tplora.run.evaluate import say_merged_loss
from tplora.run.export import find_parts, merge_parts
from tplora.run.gguf_export import gguf_scratch
from tplora.run.merging import base_to_merge_into
from tplora.terminal.show import byte_bar, say

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["export_and_say", "merge_and_say"]


def export_and_say(
    named: str, consumer: str, out: Path, *, base: str | None, dtype: str | None, overwrite: bool
) -> None:
    """Write an adapter for a consumer, and say what was changed and how it is served."""
    done = export_for(
        named, consumer, out, base=base, dtype=dtype, overwrite=overwrite, progress=say
    )
    for change in done.changes:
        say(change)
    say(f"adapter for {done.title}: {out}", style="green")
    if done.serve:
        say(done.serve)


def merge_and_say(
    named: str,
    merged: Path,
    *,
    base: str | None,
    others: Sequence[str],
    weight: float,
    dtype: str | None,
    overwrite: bool,
    into: Literal["auto", "dequantized", "original"],
    evaluate: bool,
    push_to_hub: str | None,
    private: bool,
) -> None:
    """Merge adapters into their base, and say what came of it; the arguments are the command's."""
    if merged.suffix == ".gguf":
        with gguf_scratch(named, merged, base=base, overwrite=overwrite, push=push_to_hub) as place:
            merge_and_say(
                named,
                place,
                base=base,
                others=others,
                weight=weight,
                dtype=dtype,
                overwrite=False,
                into=into,
                evaluate=evaluate,
                push_to_hub=None,
                private=private,
            )
            say(f"writing {merged}")
        say(f"merged model in GGUF: {merged}", style="green")
        return
    if push_to_hub is not None:
        check_repo(push_to_hub, where="--push-to-hub")
    parts = find_parts(named, base=base, weight=weight, others=others, progress=say)
    with (
        base_to_merge_into(parts.base, into=into) as source,
        byte_bar() as on_bytes,
    ):
        report = merge_parts(
            parts,
            source.tensors,
            merged,
            dtype=dtype,
            overwrite=overwrite,
            progress=say,
            on_bytes=on_bytes,
        )
    if report.unchanged:
        say(f"{len(report.unchanged)} of {len(report.changed)} tensors came out as the base's")
    write_merged_card(Path(named), parts.adapter, parts.base.path, merged)
    say(f"merged model: {merged}", style="green")
    if push_to_hub is not None:
        say(f"pushed: {push_folder(merged, push_to_hub, private=private, progress=say)}")
    if source.note:
        say(source.note)
        if evaluate:
            say_merged_loss(Path(named), merged, parts.base, say=say)
