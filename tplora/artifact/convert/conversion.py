"""``tplora convert``: what is asked for, in the one order in which it makes sense.

    names -> layout of a base -> sum -> rank -> dtype

Names and layout come first, so that adapters of two variants of a base can be summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tplora.artifact.convert.check import check_convertible, check_plain_layers
from tplora.artifact.convert.combination import combine
from tplora.artifact.convert.config import config_of
from tplora.artifact.convert.fused import FUSED, Moved, fit_layout
from tplora.artifact.convert.layers import LoadedAdapter, load_adapter
from tplora.artifact.convert.reduction import Loss, reduce_rank
from tplora.artifact.convert.rename import check_prefixes, rename
from tplora.artifact.convert.target import TargetBase, read_target_base
from tplora.artifact.convert.write import write_converted
from tplora.errors import ArtifactError
from tplora.saved.config import CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Conversion", "Converted", "convert_adapter"]

_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to do with an adapter. A value; the defaults do nothing."""

    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of modules' names, old to new."""
    others: Mapping[Path, float] = field(default_factory=dict)
    """Adapters to add, with the weights of their delta weights."""
    weight: float = 1.0
    """Of the first adapter's."""
    how: str = "cat"
    """"cat", "linear" or "svd", as PEFT calls them."""
    to_base: str | None = None
    """Folder or hub id of the base whose layers the result has to fit."""
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further fused projections, with their parts in the order of their rows."""
    r: int | None = None
    """To reduce the rank to."""
    dtype: str | None = None
    base_name: str | None = None
    """To write into the config as the name of the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What was done."""

    layers: int
    ranks: tuple[int, ...]
    """All that there are in the result."""
    moved: Moved
    losses: Mapping[str, Loss]
    """By module, where the rank was reduced."""


def convert_adapter(
    folder: Path,
    out: Path,
    asked: Conversion,
    *,
    overwrite: bool = False,
    on_layer: Callable[[int, int], None] = lambda done, of: None,
) -> Converted:
    """Write another adapter of one that plain PEFT reads, or of several.

    Args:
        folder: An adapter's.
        out: The folder to be.
        asked: What to do.
        overwrite: Replace what ``out`` holds.
        on_layer: Called with layers reduced and layers to reduce.

    Raises:
        ArtifactError: If it cannot be done exactly, but for the rank, or nothing is asked for.
    """
    _check_asked(asked)
    _check_replaceable(out)
    base = None if asked.to_base is None else read_target_base(asked.to_base)
    first = load_adapter(folder)
    fitted = [_fitted(one, base, asked) for one in _named(first, asked)]
    adapter, svd_r = _summed([one for one, _ in fitted], asked)
    adapter, losses = _reduced(adapter, asked.r or svd_r, on_layer)
    linears = () if base is None else base.weights
    config = config_of(adapter, first.layers, linears=linears)
    name = asked.base_name or asked.to_base
    if name is not None:
        config.base_model_name_or_path, config.revision = name, None
    write_converted(
        adapter,
        config,
        out,
        dtype=None if asked.dtype is None else _DTYPES[asked.dtype],
        base=base,
        is_same_base=name is None and not asked.prefixes,
        overwrite=overwrite,
    )
    moved = _all_moved([one for _, one in fitted])
    ranks = tuple(sorted({layer.r for layer in adapter.layers.values()}))
    return Converted(layers=len(adapter.layers), ranks=ranks, moved=moved, losses=losses)


def _check_asked(asked: Conversion) -> None:
    if asked.dtype is not None and asked.dtype not in _DTYPES:
        names = ", ".join(_DTYPES)
        raise ArtifactError(f"--dtype {asked.dtype}: is none of {names}; choose one of them")
    if asked == Conversion():
        raise ArtifactError(
            "nothing is asked for; name --to-base, --rank, --add, --dtype, --rename or --base"
        )
    for option, is_given in (("--weight", asked.weight != 1), ("--combine", asked.how != "cat")):
        if is_given and not asked.others:
            raise ArtifactError(f"{option}: needs other adapters; name them with --add PATH=WEIGHT")
    if asked.fused and asked.to_base is None:
        raise ArtifactError("--fused: needs the base to fit; name it with --to-base")


def _check_replaceable(out: Path) -> None:
    """Only an adapter is replaced by one: a run's folder holds more than its adapter."""
    if out.is_dir() and any(out.iterdir()) and not (out / CONFIG).is_file():
        raise ArtifactError(
            f"{out}: holds files and no {CONFIG}, so it is not replaced; name another place"
        )


def _named(first: LoadedAdapter, asked: Conversion) -> list[LoadedAdapter]:
    """All adapters, under the names that are asked for."""
    adapters = [first, *map(load_adapter, asked.others)]
    if not asked.prefixes:
        return adapters
    check_prefixes(adapters, asked.prefixes)
    return [_renamed(one, asked.prefixes) for one in adapters]


def _summed(
    adapters: Sequence[LoadedAdapter], asked: Conversion
) -> tuple[LoadedAdapter, int | None]:
    """The sum, and the rank that PEFT's ``svd`` would give it, if that is asked for."""
    if not asked.others:
        return adapters[0], None
    for one in adapters:
        check_convertible(one, "a sum of adapters")
    how = "linear" if asked.how == "linear" else "cat"
    summed = combine(adapters, [asked.weight, *asked.others.values()], how=how)
    usual, largest = (
        max(layer.r for one in found for layer in one.layers.values())
        for found in (adapters, [summed])
    )
    return summed, usual if asked.how == "svd" and usual < largest else None


def _all_moved(moved: Sequence[Moved]) -> Moved:
    return Moved(
        split=sum(one.split for one in moved),
        fused=sum(one.fused for one in moved),
        fused_at_own_rank=sum(one.fused_at_own_rank for one in moved),
    )


def _renamed(adapter: LoadedAdapter, prefixes: Mapping[str, str]) -> LoadedAdapter:
    check_convertible(adapter, "another name")
    return rename(adapter, prefixes)


def _fitted(
    adapter: LoadedAdapter, base: TargetBase | None, asked: Conversion
) -> tuple[LoadedAdapter, Moved]:
    if base is None:
        return adapter, Moved()
    fitted, moved = fit_layout(adapter, base.weights, {**FUSED, **asked.fused})
    if not (moved.split or moved.fused):
        return adapter, moved
    check_convertible(adapter, "another layout")
    if adapter.config.target_parameters or adapter.config.bias != "none":
        field = "target_parameters" if adapter.config.target_parameters else "bias"
        raise ArtifactError(
            f"{adapter.folder}/adapter_config.json: {field} is set, which another layout has no "
            "place for; merge the adapter into its base instead: tplora export"
        )
    if moved.fused and base.is_interleaved and not asked.fused:
        raise ArtifactError(
            f"{base.name}: {base.config.model_type} has the rows of its fused projections in "
            "turns, head by head; an adapter of separate ones cannot be put on it"
        )
    return fitted, moved


def _reduced(
    adapter: LoadedAdapter, r: int | None, on_layer: Callable[[int, int], None]
) -> tuple[LoadedAdapter, Mapping[str, Loss]]:
    if r is None:
        return adapter, {}
    check_convertible(adapter, "another rank")
    check_plain_layers([adapter], "another rank")
    return reduce_rank(adapter, r, on_layer=on_layer)
