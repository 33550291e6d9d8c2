"""Adapters on fused projections and on separate ones: qkv <-> q, k, v and gate_up <-> gate, up.

    split    A_q = A_k = A_v = A,                        B_q, B_k, B_v = rows of B
    fuse     A = [A_q; A_k; A_v],                        B = diag(B_q, B_k, B_v)
             A = A_q, B = [B_q; B_k; B_v]                where A_q, A_k and A_v are one

Both keep every delta weight; the fused rank is the sum of the ranks. A mean of the A would not.
A part that is not adapted has rows of zeros. DoRA's vector and the bias of B belong to rows of the
output, and are cut and joined with them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tplora.artifact.convert.layers import LoadedAdapter, LoraLayer
from tplora.errors import ArtifactError
from tplora.saved.keys import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["FUSED", "Moved", "fit_layout"]

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused projection to its parts, in the order of its rows (Phi-3, GLM; transformers 5.24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What was done, in numbers of modules that came of it."""

    split: int = 0
    fused: int = 0
    fused_at_own_rank: int = 0
    """Of the fused ones, those whose parts share one A, or are only one part."""


def fit_layout(
    adapter: LoadedAdapter,
    weights: Mapping[str, tuple[int, ...]],
    table: Mapping[str, Sequence[str]] = FUSED,
) -> tuple[LoadedAdapter, Moved]:
    """Put each layer that a base does not have on what the base has in its place.

    Args:
        adapter: Of a base with another layout.
        weights: Of the base to fit, module to ``[out, in]``.
        table: Fused projection to its parts, in the order of its rows.

    Raises:
        ArtifactError: If the base has neither a layer's module nor what is fused of or into it, or
            sizes differ.
    """
    fused_of = {part: fused for fused, parts in table.items() for part in parts}
    layers: dict[str, LoraLayer] = {}
    joined: dict[str, list[str]] = {}
    num_split = 0
    for module, layer in adapter.layers.items():
        parent, dot, last = module.rpartition(".")
        inner = [f"{parent}{dot}{part}" for part in table.get(last, ())]
        outer = fused_of.get(last, "")
        if module in weights or layer.a.shape[0] > 1:
            layers[module] = layer
            _check_kept(adapter, module, weights)
        elif inner and all(part in weights for part in inner):
            _check_once(adapter, module, inner)
            layers |= _split(adapter, module, inner, weights)
            num_split += len(inner)
        elif f"{parent}{dot}{outer}" in weights:
            joined[f"{parent}{dot}{outer}"] = [f"{parent}{dot}{part}" for part in table[outer]]
        else:
            raise ArtifactError(
                f"{adapter.folder}: adapts {module}, and the base has neither that nor what is "
                "fused of or into it; name its prefix with --rename OLD=NEW, or the parts with "
                "--fused NAME=PART,PART"
            )
    at_own = 0
    for module, parts in joined.items():
        _check_once(adapter, module, parts)
        layers[module] = _fuse(adapter, module, parts, weights)
        at_own += _has_one_a(adapter.layers[part] for part in parts if part in adapter.layers)
    moved = Moved(split=num_split, fused=len(joined), fused_at_own_rank=at_own)
    return replace(adapter, layers=layers), moved


def _check_kept(
    adapter: LoadedAdapter, module: str, weights: Mapping[str, tuple[int, ...]]
) -> None:
    """But for embeddings and heads, which may have been given more tokens."""
    layer = adapter.layers[module]
    is_end = not any(part.isdigit() for part in module.split("."))
    if layer.a.shape[0] == 1 and not is_end and not adapter.config.use_bdlora:
        _check_size(adapter, module, (layer.b.shape[1], layer.a.shape[2]), weights[module])


def _split(
    adapter: LoadedAdapter,
    module: str,
    parts: Sequence[str],
    weights: Mapping[str, tuple[int, ...]],
) -> dict[str, LoraLayer]:
    layer = adapter.layers[module]
    _check_movable(adapter, module)
    sizes = [weights[part][0] for part in parts]
    found = (layer.b.shape[1], layer.a.shape[2])
    _check_size(adapter, module, found, (sum(sizes), weights[parts[0]][1]))
    b = torch.split(layer.b, sizes, dim=1)
    magnitude, bias = (
        [None] * len(parts) if vector is None else list(torch.split(vector, sizes))
        for vector in (layer.magnitude, layer.bias)
    )
    return {
        part: replace(layer, b=b[k], magnitude=magnitude[k], bias=bias[k])
        for k, part in enumerate(parts)
    }


def _fuse(
    adapter: LoadedAdapter,
    module: str,
    parts: Sequence[str],
    weights: Mapping[str, tuple[int, ...]],
) -> LoraLayer:
    held = {part: adapter.layers[part] for part in parts if part in adapter.layers}
    for part in held:
        _check_movable(adapter, part)
    first = next(iter(held.values()))
    layers = {part: layer.with_scaling(first.scaling) for part, layer in held.items()}
    sizes = _row_sizes(adapter, module, parts, weights[module])
    has_one_a = _has_one_a(held.values())
    return LoraLayer(
        a=first.a if has_one_a else torch.cat([layer.a for layer in layers.values()], dim=1),
        b=_blocks(layers, sizes, has_one_a=has_one_a),
        scaling=first.scaling,
        dtype=_widest([layer.dtype for layer in layers.values()]),
        magnitude=_joined(adapter, module, parts, {p: one.magnitude for p, one in layers.items()}),
        bias=_joined_bias(layers, sizes),
    )


def _blocks(
    layers: Mapping[str, LoraLayer], sizes: Mapping[str, int], *, has_one_a: bool
) -> torch.Tensor:
    """B of all parts, ``[1, out, r]``; each has columns of its own unless they share A."""
    dtype = _widest([layer.b.dtype for layer in layers.values()])
    ranks = [layer.r for layer in layers.values()]
    b = torch.zeros(1, sum(sizes.values()), ranks[0] if has_one_a else sum(ranks), dtype=dtype)
    row = column = 0
    for part, size in sizes.items():
        if part in layers:
            layer = layers[part]
            b[:, row : row + size, column : column + layer.r] = layer.b
            column += 0 if has_one_a else layer.r
        row += size
    return b


def _row_sizes(
    adapter: LoadedAdapter, module: str, parts: Sequence[str], weight: tuple[int, ...]
) -> dict[str, int]:
    """Rows of each part, in order; those of keys and of values are as many."""
    held = {part: adapter.layers[part] for part in parts if part in adapter.layers}
    known = {part: layer.b.shape[1] for part, layer in held.items()}
    ends = {part.rpartition(".")[2]: part for part in parts}
    twins = {"k_proj", "v_proj"} & ends.keys()
    found = [known[ends[twin]] for twin in twins if ends[twin] in known]
    known = dict.fromkeys((ends[twin] for twin in twins), found[0]) | known if found else known
    missing = [part for part in parts if part not in known]
    left = weight[0] - sum(known.values())
    are_alike = len(missing) == 1 or missing == [ends[one] for one in ends if one in twins]
    if missing and left > 0 and left % len(missing) == 0 and are_alike:
        known |= dict.fromkeys(missing, left // len(missing))
    if set(known) == set(parts):
        for layer in held.values():
            _check_size(adapter, module, (sum(known.values()), layer.a.shape[2]), weight)
        return {part: known[part] for part in parts}
    raise ArtifactError(
        f"{adapter.folder}: {', '.join(missing)} are not adapted, and how many of the "
        f"{weight[0]} rows of {module} are theirs cannot be told; adapt all parts"
    )


def _joined(
    adapter: LoadedAdapter,
    module: str,
    parts: Sequence[str],
    vectors: Mapping[str, torch.Tensor | None],
) -> torch.Tensor | None:
    """DoRA's vector of all parts; one that is missing is the norm of the base's own rows."""
    found = [vector for vector in vectors.values() if vector is not None]
    if found and len(found) < len(parts):
        raise ArtifactError(
            f"{adapter.folder}: DoRA's magnitudes of {module} are needed for all of "
            f"{', '.join(parts)}, and only {len(found)} of them are adapted; merge the adapter "
            "into its base instead: tplora export"
        )
    return torch.cat(found) if found else None


def _joined_bias(layers: Mapping[str, LoraLayer], sizes: Mapping[str, int]) -> torch.Tensor | None:
    biases = {part: layer.bias for part, layer in layers.items() if layer.bias is not None}
    if not biases:
        return None
    dtype = _widest([bias.dtype for bias in biases.values()])
    return torch.cat(
        [
            biases[part].to(dtype) if part in biases else torch.zeros(size, dtype=dtype)
            for part, size in sizes.items()
        ]
    )


def _has_one_a(layers: Iterable[LoraLayer]) -> bool:
    first, *others = layers
    return all(torch.equal(layer.a, first.a) for layer in others)


def _check_once(adapter: LoadedAdapter, fused: str, parts: Sequence[str]) -> None:
    """A fused layer and its parts are one weight, which is adapted once."""
    found = [part for part in parts if part in adapter.layers]
    if fused in adapter.layers and found:
        raise ArtifactError(
            f"{adapter.folder}: adapts {fused} and {found[0]}, which are one weight of a base; "
            "save the adapter again from the model that it was trained on"
        )


def _check_movable(adapter: LoadedAdapter, module: str) -> None:
    """A layer that is a matrix, of which nothing but factors is in the file."""
    layer = adapter.layers[module]
    if layer.is_embedding or layer.a.shape[0] > 1:
        raise ArtifactError(
            f"{adapter.folder}: {module} is no linear layer of one weight; it cannot be split or "
            "fused, name the base that the adapter was trained on"
        )
    beside = [key for key in adapter.rest if key.startswith(f"{PREFIX}{module}.")]
    if beside:
        raise ArtifactError(
            f"{adapter.folder}: holds {beside[0]}, which is no factor and cannot be split or "
            "fused; merge the adapter into its base instead: tplora export"
        )


def _check_size(
    adapter: LoadedAdapter, module: str, found: tuple[int, int], needed: tuple[int, ...]
) -> None:
    if found != tuple(needed):
        raise ArtifactError(
            f"{adapter.folder}: the factors of {module} make a weight {list(found)}, "
            f"{list(needed)} is needed; this is another base"
        )


def _widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)
