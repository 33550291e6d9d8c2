"""Two adapters side by side: whether they adapt the same, and how far their deltas are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tplora.artifact.adapter_dir import AdapterFiles, FactorPair, read_adapter
from tplora.artifact.inspection import kind_of, read_delta
from tplora.artifact.low_rank_norm import cosine, distance, norm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Comparison", "DeltaDifference", "TensorDifference", "compare_adapters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaDifference:
    """Of one module that both adapt."""

    module: str
    r: tuple[int, int]
    norms: tuple[float, float]
    """Frobenius, of the delta weights."""
    distance: float
    """Of their difference."""
    relative: float
    """The distance over the larger norm; 0 where both are zero."""
    cosine: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """Of a tensor beside the factors that both hold."""

    name: str
    relative: float
    """Norm of the difference over the larger norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of two adapters, the first and the second."""

    folders: tuple[str, str]
    settings: dict[str, tuple[str, str]]
    """Fields of the config that differ."""
    only_first: tuple[str, ...]
    """What the first alone adapts or holds."""
    only_second: tuple[str, ...]
    unlike: tuple[str, ...]
    """What both have, in shapes that cannot be compared."""
    layers: tuple[DeltaDifference, ...]
    others: tuple[TensorDifference, ...]

    @property
    def has_same_targets(self) -> bool:
        """Whether both hold the same tensors of the same model."""
        return not (self.only_first or self.only_second or self.unlike)

    @property
    def largest(self) -> float | None:
        """The largest relative difference; None where there is nothing to compare."""
        found = [one.relative for one in self.layers] + [one.relative for one in self.others]
        return max(found, default=None)


def compare_adapters(first: Path, second: Path) -> Comparison:
    """Compare what two adapters do to the base; no delta weight is built.

    Raises:
        ArtifactError: If one of them is damaged.
    """
    one, other = read_adapter(first), read_adapter(second)
    pairs = [{pair.module: pair for pair in adapter.pairs} for adapter in (one, other)]
    beside = [dict(_beside(adapter)) for adapter in (one, other)]
    names = [{*pairs[k], *beside[k]} for k in (0, 1)]
    layers = {
        name: _layer(one, pairs[0][name], other, pairs[1][name])
        for name in sorted(pairs[0].keys() & pairs[1].keys())
    }
    others = {
        name: _tensor(name, one, beside[0][name], other, beside[1][name])
        for name in sorted(beside[0].keys() & beside[1].keys())
    }
    return Comparison(
        folders=(str(first), str(second)),
        settings=_settings(one, other),
        only_first=tuple(sorted(names[0] - names[1])),
        only_second=tuple(sorted(names[1] - names[0])),
        unlike=tuple(name for name, found in (layers | others).items() if found is None),
        layers=tuple(found for found in layers.values() if found is not None),
        others=tuple(found for found in others.values() if found is not None),
    )


def _layer(
    one: AdapterFiles, ours: FactorPair, other: AdapterFiles, theirs: FactorPair
) -> DeltaDifference | None:
    mine, its = read_delta(one, ours), read_delta(other, theirs)
    if mine is None or its is None or mine.shape != its.shape:
        return None
    norms, gap = (norm(mine), norm(its)), distance(mine, its)
    return DeltaDifference(
        module=ours.module,
        r=(mine.a.shape[1], its.a.shape[1]),
        norms=norms,
        distance=gap,
        relative=_share(gap, max(norms)),
        cosine=cosine(mine, its),
    )


def _tensor(
    name: str, one: AdapterFiles, ours: str, other: AdapterFiles, theirs: str
) -> TensorDifference | None:
    a, b = one.tensor(ours).double(), other.tensor(theirs).double()
    if a.shape != b.shape:
        return None
    largest = float(max(a.norm(), b.norm()))
    return TensorDifference(name=name, relative=_share(float((a - b).norm()), largest))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _beside(adapter: AdapterFiles) -> Iterator[tuple[str, str]]:
    """Name and key of every tensor that is no A and no B."""
    yield from adapter.others.items()
    for module, key in adapter.trained_tokens.items():
        yield f"{module} (tokens)", key
    for pair in adapter.pairs:
        if pair.magnitude is not None:
            yield f"{pair.module} (magnitudes)", pair.magnitude
        if pair.bias is not None:
            yield f"{pair.module} (bias of B)", pair.bias


def _settings(one: AdapterFiles, other: AdapterFiles) -> dict[str, tuple[str, str]]:
    left_out = {"peft_version", "inference_mode", "auto_mapping"}
    found = {}
    for name in type(one.config).__dataclass_fields__:
        ours, theirs = (_said(getattr(adapter.config, name)) for adapter in (one, other))
        if name not in left_out and ours != theirs:
            found[name] = (ours, theirs)
    return found


def _said(value: object) -> str:
    is_names = isinstance(value, set | list) and all(isinstance(one, str) for one in value)
    return ", ".join(sorted({kind_of(one) for one in value})) if is_names else str(value)  # type: ignore[attr-defined]
