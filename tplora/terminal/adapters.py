"""What adapters hold and how two differ, as tables of one row per kind of module, and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tplora.artifact.inspection import kind_of
from tplora.plan.report import common_prefix
from tplora.plan.size import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tplora.artifact.comparison import Comparison, DeltaDifference
    from tplora.artifact.inspection import Inspection, LayerFacts

__all__ = ["as_json", "comparison_tables", "inspection_tables"]

_ROLES = {
    "linear": "linear layers", "experts": "expert weights", "router": "routers",
    "embedding": "embeddings", "head": "heads",
}  # fmt: skip


def inspection_tables(found: Inspection, *, by_layer: bool = False) -> RenderableType:
    """An adapter: facts, factors, what lies beside them, signs."""
    facts = [
        ("folder", found.folder),
        ("base", found.base or "not named"),
        ("file", f"{found.file}, {format_size(found.num_bytes)}, {', '.join(found.dtypes)}"),
        ("saved by peft", found.peft_version or "not said"),
        ("parameters", f"{found.num_parameters:,}"),
        *([("coverage", _coverage(found))] if found.coverage else []),
        *((name, _short(value)) for name, value in found.settings.items()),
    ]
    blocks: list[RenderableType] = [_pairs(facts)]
    if found.layers:
        blocks.append(_factors(found.layers, by_layer=by_layer))
    if found.others:
        blocks.append(_others(found, by_layer=by_layer))
    blocks.append(_signs(found.signs))
    return Group(*blocks)


def comparison_tables(found: Comparison, *, by_layer: bool = False) -> RenderableType:
    """Two adapters: what differs, by kind of module."""
    largest = "nothing to compare" if found.largest is None else f"{found.largest:.3g}"
    facts = [
        ("A", found.folders[0]),
        ("B", found.folders[1]),
        ("same targets", "yes" if found.has_same_targets else "no"),
        ("largest difference", f"{largest} (relative to the larger of the two)"),
        *((name, f"{_short(a)}  |  {_short(b)}") for name, (a, b) in found.settings.items()),
    ]
    gone = (("only in A", found.only_first), ("only in B", found.only_second))
    for said, names in (*gone, ("of other shapes", found.unlike)):
        if names:
            kinds = ", ".join(dict.fromkeys(map(kind_of, names)))
            facts.append((said, f"{len(names)}: {_short(kinds)}"))
    blocks: list[RenderableType] = [_pairs(facts)]
    if found.layers:
        blocks.append(_deltas(found.layers, by_layer=by_layer))
    if found.others:
        table = _table("beside the factors", "tensors", "difference")
        for kind, rest in _grouped(found.others, by_layer=by_layer, key="name").items():
            table.add_row(kind, str(len(rest)), _range([one.relative for one in rest]))
        blocks.append(table)
    return Group(*blocks)


def _deltas(layers: Sequence[DeltaDifference], *, by_layer: bool) -> Table:
    groups = _grouped(layers, by_layer=by_layer)
    common = _common(groups)
    columns = ("n", "r", "|delta A|", "|delta B|", "difference", "cosine")
    table = _table("module", *columns, title=common)
    for kind, group in groups.items():
        table.add_row(
            kind.removeprefix(common),
            str(len(group)),
            _one_of(str(one.r[0]) if len(set(one.r)) == 1 else f"{one.r}" for one in group),
            _range([one.norms[0] for one in group]),
            _range([one.norms[1] for one in group]),
            _range([one.relative for one in group]),
            _range([one.cosine for one in group]),
        )
    return table


def _common(groups: Iterable[str]) -> str:
    """What the names begin with, to be said once."""
    names = [name for name in groups if "." in name]
    return common_prefix(names) if len(names) > 1 else ""


def as_json(found: Inspection | Comparison) -> str:
    """Everything, by layer; a number that is not finite is null."""
    values = dataclasses.asdict(found)
    for name in ("has_same_targets", "largest"):
        if hasattr(found, name):
            values[name] = getattr(found, name)
    return json.dumps(_plain(values), indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _factors(layers: Sequence[LayerFacts], *, by_layer: bool) -> Table:
    groups = _grouped(layers, by_layer=by_layer)
    common = _common(groups)
    table = _table("module", "n", "r", "A", "B", "|A|", "|B|", "|delta|", title=common)
    for kind, group in groups.items():
        deltas = [one.delta_norm for one in group if one.delta_norm is not None]
        table.add_row(
            kind.removeprefix(common),
            str(len(group)),
            _one_of(str(one.r) for one in group),
            _one_of(str(list(one.a_shape)) for one in group),
            _one_of(str(list(one.b_shape)) for one in group),
            _range([one.a_norm for one in group]),
            _range([one.b_norm for one in group]),
            _range(deltas) if deltas else "-",
        )
    return table


def _others(found: Inspection, *, by_layer: bool) -> Table:
    table = _table("beside the factors", "what", "tensors", "shape", "norm")
    for kind, group in _grouped(found.others, by_layer=by_layer, key="name").items():
        table.add_row(
            kind,
            _one_of(one.what for one in group),
            str(len(group)),
            _one_of(str(list(one.shape)) for one in group),
            _range([one.norm for one in group]),
        )
    return table


def _grouped(found: Sequence[Any], *, by_layer: bool, key: str = "module") -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for one in found:
        name = getattr(one, key)
        groups.setdefault(name if by_layer else kind_of(name), []).append(one)
    return groups


def _signs(signs: Sequence[str]) -> RenderableType:
    if not signs:
        return Text("nothing looks wrong", style="green")
    return Group(*(Text(f"suspicious: {sign}", style="yellow") for sign in signs))


def _coverage(found: Inspection) -> str:
    counts = found.coverage.items()
    return ", ".join(f"{n} of {of} {_ROLES.get(role, role)}" for role, (n, of) in counts)


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _table(first: str, *columns: str, title: str = "") -> Table:
    table = Table(
        title=f"\n{title}" if title else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    # Names stay whole, and numbers are folded, where a terminal is narrow.
    table.add_column(first, overflow="fold", no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right")
    return table


def _one_of(texts: Iterable[str]) -> str:
    found = list(dict.fromkeys(texts))
    return found[0] if len(found) == 1 else f"{found[0]} and {len(found) - 1} more"


def _range(values: Sequence[float]) -> str:
    if any(math.isnan(value) for value in values):
        return "nan"
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return f"{max(values):.3g}" if low == high else f"{low}..{high}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:180]}..."
