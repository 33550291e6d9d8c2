"""The plan as a table: what a person reads before a run, and finds in its folder afterwards."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from tplora.plan.axes_cost import axes_facts
from tplora.plan.cost import base_bytes, count_collectives, factor_bytes, loading_bytes
from tplora.plan.coverage import count_coverage, say_missed_experts
from tplora.plan.size import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.plan.layer import LayerPlan
    from tplora.plan.style import TensorPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["common_prefix", "plan_text", "render_plan"]

_WIDTH = 100
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def render_plan(
    plan: Plan, axes: Axes | None = None, predicted: Sequence[tuple[str, str]] = ()
) -> RenderableType:
    """The plan for a terminal: one row per kind of layer, then sizes and collectives.

    A cut dim is written ``576/3``: 576 in full, a third of it on each rank. Data axes, if there are
    any, are said below, and what was predicted of a step after them.
    """
    groups, trained = _grouped(plan.layers), _grouped_trained(plan.trained)
    names = [*groups, *trained]
    inner = [name for name in names if ".*." in name]  # the rest, such as a head, is named in full
    common = common_prefix(inner if len(inner) > 1 else names)
    table = Table(
        title=f"{plan.class_name} over tp_size {plan.tp_size}, adapters in {common or 'the model'}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("module", overflow="fold")
    table.add_column("layers", justify="right")
    table.add_column("style", max_width=10)  # a long name wraps, so that the module's need not
    for name in ("W [out, in]", "A [r, in]", "B [out, r]"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for pattern, layers in groups.items():
        first = layers[0]
        table.add_row(
            pattern.removeprefix(common),
            str(len(layers)),
            (first.style or "whole").replace("_", " "),
            *(_shape(tensor, plan.tp_size) for tensor in (first.weight, first.a, first.b)),
        )
    for pattern, parts in trained.items():
        one = parts[0]
        table.add_row(
            pattern.removeprefix(common),
            str(len(parts)),
            (one.style or "whole").replace("_", " "),
            _shape(one.weight, plan.tp_size) if one.weight else "",
            _what(one),
            "",
        )
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    counted = any(name == "bytes and collectives" for name, _ in predicted)
    own = _facts(plan, is_counted_elsewhere=counted)
    for name, value in [*own, *(axes_facts(plan, axes) if axes else ()), *predicted]:
        facts.add_row(name, value)
    return Group(table, _coverage(plan), facts)


def _coverage(plan: Plan) -> RenderableType:
    """How many weights of each kind are adapted, and how much of the model they are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kind of weight")
    for name in ("adapted", "of", "parameters", "share of the model"):
        table.add_column(name, justify="right")
    rows = count_coverage(plan)
    total = sum(row.num_parameters for row in rows)
    for row in rows:
        table.add_row(
            row.label,
            str(row.num_adapted),
            str(row.num_weights),
            f"{row.num_parameters:,}",
            f"{100 * row.num_parameters / total:.3g} %",
        )
    return table


def plan_text(plan: Plan, axes: Axes | None = None) -> str:
    """The plan as plain text, for ``plan.txt``."""
    text = StringIO()
    Console(width=_WIDTH, file=text, color_system=None).print(render_plan(plan, axes))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _grouped(layers: Iterable[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Layers by name without numbers; those that are cut differently apart."""
    groups: dict[tuple[object, ...], list[LayerPlan]] = {}
    for layer in layers:
        key = (_NUMBER.sub(".*", layer.name), layer.style, layer.weight, layer.a, layer.b)
        groups.setdefault(key, []).append(layer)
    named: dict[str, list[LayerPlan]] = {}
    for members in groups.values():
        pattern = _NUMBER.sub(".*", members[0].name)
        named[pattern if pattern not in named else members[0].name] = members
    return named


def _grouped_trained(parts: Iterable[TrainedPlan]) -> dict[str, list[TrainedPlan]]:
    """What is trained itself, by name without numbers and by what of it is."""
    groups: dict[str, list[TrainedPlan]] = {}
    for part in parts:
        pattern = _NUMBER.sub(".*", part.name)
        groups.setdefault(f"{pattern}.bias" if part.what == "bias" else pattern, []).append(part)
    return groups


def _what(part: TrainedPlan) -> str:
    what = {
        "module": "trained whole",
        "tokens": f"{len(part.tokens)} tokens trained",
        "bias": "bias trained",
    }[part.what]
    return what if part.tied_to is None else f"with {part.tied_to.rpartition('.')[2]}"


def common_prefix(patterns: list[str]) -> str:
    """The leading parts, with their dots, that all patterns share; nothing for a single one."""
    shared = []
    for parts in zip(*(pattern.split(".")[:-1] for pattern in patterns), strict=False):
        if len(patterns) < 2 or len(set(parts)) > 1:
            break
        shared.append(parts[0] + ".")
    return "".join(shared)


def _shape(tensor: TensorPlan, tp_size: int) -> str:
    """The full shape, and on the cut dim by how many ranks it is shared."""
    sizes = [
        f"{size}/{tp_size}" if dim == tensor.shard_dim else str(size)
        for dim, size in enumerate(tensor.shape)
    ]
    return f"[{', '.join(sizes)}]"


def _facts(plan: Plan, *, is_counted_elsewhere: bool) -> list[tuple[str, str]]:
    count = count_collectives(plan)
    total = sum(parameter.numel for parameter in plan.facts.parameters)
    base = base_bytes(plan, 0, bytes_per_element=plan.base_dtype_bytes)
    factors, trained = factor_bytes(plan, 0), factor_bytes(plan, 0, only_trained=True)
    rows = [
        (
            "trainable parameters",
            f"{plan.num_trainable:,} of {total + plan.num_trainable:,} "
            f"({100 * plan.num_trainable / (total + plan.num_trainable):.3g} %)",
        ),
        (
            "bytes per rank",
            f"base {format_size(base)} ({_base_dtype(plan)}), factors {format_size(factors)}, "
            f"their gradients {format_size(trained)}, AdamW state {format_size(2 * trained)}; "
            "activations come on top",
        ),
    ]
    if plan.sequence is not None:
        num_units, num_rows = len(plan.sequence.units), len(plan.sequence.rows)
        rows.append(
            (
                "sequence",
                f"cut over the {plan.tp_size} ranks but for {num_units} modules that gather it; "
                f"{num_rows} row-parallel layers scatter their sums",
            )
        )
    missed = say_missed_experts(plan)
    if missed:
        rows.append(("experts", missed))
    if plan.tp_size > 1 and (count is not None or not is_counted_elsewhere):
        rows.append(
            (
                "collectives per step",
                "not counted from the plan of this kind of model (`tplora plan` runs a step "
                "through without weights); the adapter adds none to the base's but one bucket of "
                "partial gradients per optimizer step"
                if count is None
                else f"forward {count.forward}, backward {count.backward}, and {count.bucket} "
                "bucket of partial gradients per optimizer step; the adapter adds none to the "
                "base's",
            )
        )
    return rows


def _base_dtype(plan: Plan) -> str:
    """What the base is held in; what is quantised comes first, and what that takes in loading."""
    if plan.quantization is None:
        return plan.base_dtype
    most = loading_bytes(plan, 0, bytes_per_element=plan.base_dtype_bytes)
    return (
        f"{plan.quantization} in {len(plan.quantization.names)} linear layers, the rest in "
        f"{plan.base_dtype}; {format_size(most)} more while it loads"
    )
