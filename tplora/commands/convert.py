"""``tplora convert``: words of a command line to a conversion, and what it says afterwards.

Imports stand inside the functions, as in the other commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tplora.artifact.convert.conversion import Conversion, Converted

__all__ = ["convert"]

Key = TypeVar("Key")
Value = TypeVar("Value")


def convert(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter, or a run.")],
    out: Annotated[Path, typer.Option(metavar="OUT", help="Folder of the new adapter.")],
    to_base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE",
            help="Fit the layers of this base: qkv and gate_up are split, or q, k, v and gate, up "
            "are fused.",
        ),
    ] = None,
    fused: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PART,PART",
            help="A further fused layer, and its parts in the order of its rows. Can be repeated.",
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Reduce the rank by SVD; says what is lost.")
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH=WEIGHT", help="An adapter to add. Can be repeated."),
    ] = None,
    weight: Annotated[float, typer.Option(help="Of ADAPTER in the sum.")] = 1.0,
    combine: Annotated[
        Literal["cat", "linear", "svd"],
        typer.Option(help="cat: the exact sum. linear, svd: as peft has them, at the same rank."),
    ] = "cat",
    dtype: Annotated[
        str | None, typer.Option(help="Of the result, as float16.", show_default="the adapter's")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW",
            help="Begin modules' names with NEW for OLD, as model.language_model.=model. "
            "Can be repeated.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Write this name of the base.", show_default="BASE"),
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what OUT holds.")] = False,
) -> None:
    """Write an adapter in another form: layout, rank, sum of several, dtype, names.

    Exact but for --rank, and for the rounding of --dtype. What cannot be kept is refused.
    """
    from tplora.artifact.convert.conversion import Conversion, convert_adapter
    from tplora.run.folder import find_adapter
    from tplora.terminal.losses import layer_bar, loss_table
    from tplora.terminal.show import say, show

    asked = Conversion(
        prefixes=_table("--rename", map(_pair, rename or ())),
        others=_table("--add", map(_weighed, add or ())),
        weight=weight,
        how=combine,
        to_base=to_base,
        fused={
            name: tuple(parts.split(","))
            for name, parts in _table("--fused", map(_pair, fused or ())).items()
        },
        r=rank,
        dtype=dtype,
        base_name=base,
    )
    with layer_bar() as on_layer:
        found = convert_adapter(
            find_adapter(adapter), out, asked, overwrite=overwrite, on_layer=on_layer
        )
    if found.losses:
        show(loss_table(found.losses, by_layer=layers))
    for line in _said(asked, found, num_adapters=1 + len(add or ())):
        say(line)
    say(f"adapter: {out}", style="green")


def _said(asked: Conversion, found: Converted, *, num_adapters: int) -> Iterator[str]:
    moved = found.moved
    owner = f" of {num_adapters} adapters" if num_adapters > 1 else ""
    if moved.split:
        yield f"split into {moved.split} layers{owner}, each with its rows of B and the shared A"
    if moved.fused:
        at_own = moved.fused_at_own_rank
        yield (
            f"fused into {moved.fused} layers{owner}: {at_own} of parts with one A, at their own "
            f"rank, {moved.fused - at_own} at the sum of their parts' ranks"
        )
    if num_adapters > 1:
        yield f"{num_adapters} adapters combined: {asked.how}"
    yield f"{found.layers} layers of rank {_listed(found.ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _table(option: str, pairs: Iterable[tuple[Key, Value]]) -> dict[Key, Value]:
    found: dict[Key, Value] = {}
    for key, value in pairs:
        if key in found:
            raise typer.BadParameter(f"{key} is named twice", param_hint=option)
        found[key] = value
    return found


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} has no = in it")
    return old, new


def _weighed(text: str) -> tuple[Path, float]:
    from tplora.run.folder import find_adapter

    path, equals, value = text.rpartition("=")
    try:
        weight = float(value) if equals else 1.0
    except ValueError:
        raise typer.BadParameter(f"{value!r} is no number", param_hint="--add") from None
    return find_adapter(Path(path if equals else text)), weight
