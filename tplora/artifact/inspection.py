"""What an adapter's folder holds, and what in it looks wrong: shown, where a reader would refuse.

Files that cannot be trusted are refused all the same; see ``tplora.saved``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair, read_structure
from tplora.artifact.low_rank_norm import Delta, norm
from tplora.base.fingerprint import check_same_base
from tplora.errors import TploraError
from tplora.plan.facts import ModelFacts, read_facts
from tplora.upstream import build_meta_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

__all__ = ["Inspection", "LayerFacts", "OtherFacts", "inspect_adapter", "kind_of", "read_delta"]

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """One adapted module."""

    module: str
    r: int
    scaling: float
    num_matrices: int
    """Experts, or 1."""
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    a_norm: float
    b_norm: float
    delta_norm: float | None
    """Of ``scaling * B @ A``, Frobenius; None where blocks of zeros are left out of the file."""
    num_not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFacts:
    """A tensor beside the factors: a whole module, rows of tokens, a bias, a copy of the base."""

    name: str
    what: str
    shape: tuple[int, ...]
    norm: float
    num_not_finite: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """All of it."""

    folder: str
    base: str | None
    peft_version: str | None
    file: str
    num_bytes: int
    num_parameters: int
    dtypes: tuple[str, ...]
    settings: dict[str, str]
    """Of the config, what is not PEFT's default."""
    layers: tuple[LayerFacts, ...]
    others: tuple[OtherFacts, ...]
    coverage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Kind of weight to how many are adapted or trained, of how many; empty without the base."""
    signs: tuple[str, ...] = ()
    """What looks wrong."""


def inspect_adapter(folder: Path, *, base: str | None = None) -> Inspection:
    """Read every tensor once, one at a time.

    Args:
        folder: An adapter's.
        base: Folder or cached hub id; what the adapter names, if that is here, when left out.

    Raises:
        ArtifactError: If the files cannot be read, or not be trusted.
    """
    adapter = read_structure(folder)
    named = base or adapter.config.base_model_name_or_path
    facts, problem = _base_facts(named, is_asked=base is not None)
    layers = tuple(_layer(adapter, pair) for pair in adapter.pairs)
    others = tuple(_others(adapter))
    signs = [*problem, *_signs(adapter, layers, others)]
    if facts is not None:
        signs += _misfits(adapter, facts)
        signs += _other_base(folder, str(named))
    return Inspection(
        folder=str(folder),
        base=adapter.config.base_model_name_or_path,
        peft_version=adapter.config.peft_version,
        file=adapter.tensors.path.name,
        num_bytes=adapter.tensors.path.stat().st_size,
        num_parameters=sum(_numel(shape) for shape in adapter.shapes.values()),
        dtypes=tuple(sorted(str(one).removeprefix("torch.") for one in adapter.dtypes)),
        settings=_settings(adapter),
        layers=layers,
        others=others,
        coverage={} if facts is None else _coverage(adapter, facts),
        signs=tuple(signs),
    )


def kind_of(module: str) -> str:
    """A module's name without its layer's number."""
    return _NUMBER.sub(".*", module)


def read_delta(adapter: AdapterFiles, pair: FactorPair) -> Delta | None:
    """The delta weight of a pair; None where the file leaves out blocks of zeros."""
    a, b = adapter.tensor(pair.a), adapter.tensor(pair.b)
    if a.shape[0] != b.shape[1]:
        return None
    return Delta.of(a, b, scaling=pair.scaling, num_matrices=pair.num_matrices)


def _layer(adapter: AdapterFiles, pair: FactorPair) -> LayerFacts:
    a, b = adapter.tensor(pair.a).double(), adapter.tensor(pair.b).double()
    delta = None if adapter.config.use_bdlora else read_delta(adapter, pair)
    return LayerFacts(
        module=pair.module,
        r=b.shape[1] // pair.num_matrices,
        scaling=pair.scaling,
        num_matrices=pair.num_matrices,
        a_shape=tuple(a.shape),
        b_shape=tuple(b.shape),
        a_norm=float(a.norm()),
        b_norm=float(b.norm()),
        delta_norm=None if delta is None else norm(delta),
        num_not_finite=sum(int((~torch.isfinite(one)).sum()) for one in (a, b)),
    )


def _others(adapter: AdapterFiles) -> Iterator[OtherFacts]:
    named = [
        *((name, "trained whole", key) for name, key in adapter.others.items()),
        *((name, "trained tokens", key) for name, key in adapter.trained_tokens.items()),
        *((name, "the base's weight", key) for name, key in adapter.saved_bases.items()),
        *((p.module, "magnitudes", p.magnitude) for p in adapter.pairs if p.magnitude),
        *((p.module, "bias of B", p.bias) for p in adapter.pairs if p.bias),
    ]
    for name, what, key in named:
        tensor = adapter.tensor(key).double()
        yield OtherFacts(
            name=name,
            what=what,
            shape=tuple(tensor.shape),
            norm=float(tensor.norm()),
            num_not_finite=int((~torch.isfinite(tensor)).sum()),
        )


def _settings(adapter: AdapterFiles) -> dict[str, str]:
    config, usual = adapter.config, type(adapter.config)()
    left_out = {"base_model_name_or_path", "peft_version", "inference_mode", "auto_mapping"}
    found = {}
    for name in type(config).__dataclass_fields__:
        value = getattr(config, name)
        is_usual = value == getattr(usual, name) and name not in ("r", "lora_alpha")
        if not (is_usual or name in left_out):
            if isinstance(value, set | list) and all(isinstance(one, str) for one in value):
                value = ", ".join(sorted({kind_of(one) for one in value}))
            found[name] = str(getattr(value, "value", value))
    return found


def _signs(
    adapter: AdapterFiles, layers: Iterable[LayerFacts], others: Iterable[OtherFacts]
) -> Iterator[str]:
    layers = tuple(layers)
    checks: list[tuple[str, Callable[[LayerFacts], bool]]] = [
        ("values that are not finite", lambda one: one.num_not_finite > 0),
        ("a B of zeros, which does nothing, as before training", lambda one: one.b_norm == 0),
        ("an A of zeros, which does nothing", lambda one: one.a_norm == 0),
    ]
    for said, is_so in checks:
        names = [one.module for one in layers if is_so(one)]
        if names:
            yield f"{len(names)} of {len(layers)} layers have {said}: {_listed(names)}"
    names = [one.name for one in others if one.num_not_finite]
    if names:
        yield f"{_listed(names)}: {len(names)} tensors have values that are not finite"
    yield from adapter.problems
    shapes: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for one in layers:
        in_features, out_features = one.a_shape[1:], one.b_shape[:1]
        shapes.setdefault(kind_of(one.module), set()).add((in_features, out_features))
    for kind, found in shapes.items():
        if len(found) > 1:
            yield f"{kind}: layers of {len(found)} shapes; some may be shards of the others"


def _listed(names: list[str]) -> str:
    """Each kind of name once."""
    kinds = list(dict.fromkeys(map(kind_of, names))) if len(names) > 1 else names
    return ", ".join(kinds[:4]) + (", ..." if len(kinds) > 4 else "")


def _base_facts(base: str | None, *, is_asked: bool) -> tuple[ModelFacts | None, list[str]]:
    """The base's architecture, if its config is on this machine."""
    from transformers import AutoConfig  # noqa: PLC0415  (an adapter alone needs no model)

    if not base:
        return None, ["names no base"]
    try:
        config = AutoConfig.from_pretrained(base, local_files_only=True)
        return read_facts(build_meta_model(config, trust_remote_code=False)), []
    except Exception as error:  # whatever is wrong with it, the adapter can be looked at alone
        said = str(error).strip().partition("\n")[0][:120]
        return None, [f"base {base}: cannot be looked at ({said})"] if is_asked else []


def _misfits(adapter: AdapterFiles, facts: ModelFacts) -> Iterator[str]:
    """Where the factors are not of the base's modules, one line per kind."""
    shapes = {parameter.name: parameter.shape for parameter in facts.parameters}
    shapes |= {f"{module.name}.weight": module.weight_shape for module in facts.modules}
    found: dict[str, list[str]] = {}
    for pair in adapter.pairs:
        wanted = shapes.get(f"{pair.module}.weight")
        if pair.num_matrices > 1 or ".base_layer" in pair.module:
            continue
        if wanted is None:
            said = f"{kind_of(pair.module)}: the base has no such module"
        elif tuple(wanted) != pair.weight_shape and not adapter.config.use_bdlora:
            said = (
                f"{kind_of(pair.module)}: the factors make a weight {list(pair.weight_shape)}, the "
                f"base has {list(wanted)}; a shard, or another base"
            )
        else:
            continue
        found.setdefault(said, []).append(pair.module)
    for said, modules in found.items():
        yield said if len(modules) == 1 else f"{said} ({len(modules)} layers)"


def _other_base(folder: Path, base: str) -> Iterator[str]:
    try:
        check_same_base(folder, base)
    except TploraError as error:
        yield str(error).removeprefix(f"{folder}: ")


def _coverage(adapter: AdapterFiles, facts: ModelFacts) -> dict[str, tuple[int, int]]:
    owners = {pair.module.replace(".base_layer", "") for pair in adapter.pairs}
    owners |= {*adapter.trained_tokens, *(name.rpartition(".")[0] for name in adapter.others)}
    counts: dict[str, tuple[int, int]] = {}
    for parameter in facts.parameters:
        if parameter.role == "other":
            continue
        adapted, of = counts.get(parameter.role, (0, 0))
        counts[parameter.role] = (adapted + (parameter.module_name in owners), of + 1)
    return counts


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
