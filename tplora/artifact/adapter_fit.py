"""Whether an adapter is one of a base: modules are there, and factors as long as their weights."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from tplora.artifact.adapter_dir import AdapterFiles, FactorPair

__all__ = ["check_fits_base", "check_is_in_base"]


def check_is_in_base(adapter: AdapterFiles, weight_names: Collection[str]) -> None:
    """Refuse factors of modules that the base does not have; sizes are not looked at.

    Raises:
        ArtifactError: Naming the first of them.
    """
    for pair in adapter.pairs:
        is_stack = pair.num_matrices > 1 or ".base_layer" in pair.module
        if not is_stack and f"{pair.module}.weight" not in weight_names:
            raise _not_in_base(adapter, pair, weight_names)


def check_fits_base(adapter: AdapterFiles, weight_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the factors with the base's weights, which are named ``<module>.weight``.

    Raises:
        ArtifactError: If a module is not in the base, or a factor is not as long as its weight.
    """
    for pair in adapter.pairs:
        found = weight_shapes.get(f"{pair.module}.weight")
        if pair.num_matrices > 1:
            _check_fits_stack(adapter, pair, weight_shapes)
            continue
        if found is None:
            raise _not_in_base(adapter, pair, weight_shapes)
        if tuple(found) != pair.weight_shape and _has_other_tokens(pair, found):
            raise ArtifactError(
                f"{adapter.folder}: {pair.module} was adapted with {pair.weight_shape[0]} tokens, "
                f"the base has {found[0]}; resize the base as it was in training, save it, and "
                "name that"
            )
        if tuple(found) != pair.weight_shape:
            raise ArtifactError(
                f"{adapter.folder}: {pair.a} {list(adapter.shapes[pair.a])} and {pair.b} "
                f"{list(adapter.shapes[pair.b])} make a weight {list(pair.weight_shape)}, "
                f"{pair.module} of the base has {list(found)}; a factor that is a shard of the "
                "full one was saved, or this is another base"
            )


def _not_in_base(
    adapter: AdapterFiles, pair: FactorPair, weight_names: Collection[str]
) -> ArtifactError:
    return ArtifactError(
        f"{adapter.folder}: {pair.a} belongs to {pair.module}, which the base does not "
        f"have; {_say_renamed(adapter.folder, pair.module, weight_names)}"
    )


def _say_renamed(folder: Path, module: str, weight_names: Collection[str]) -> str:
    """What to do where a module is not there: other classes of a model call it otherwise."""
    parts = module.split(".")
    for k in range(1, len(parts) - 1):
        tail = ".".join(parts[k:])
        found = [name for name in weight_names if f".{name}".endswith(f".{tail}.weight")]
        if len(found) == 1 and any(part.isdigit() for part in parts[k:]):
            old, new = module.removesuffix(tail), found[0].removesuffix(f"{tail}.weight")
            return (
                f"it has {found[0].removesuffix('.weight')}: if that is meant, rename with `tplora "
                f"convert {shlex.quote(str(folder))} --rename {old}={new} --out OUT`"
            )
    return "name the base that this adapter was trained on"


def _has_other_tokens(pair: FactorPair, found: tuple[int, ...]) -> bool:
    """Whether an embedding or head was resized: it has other rows, which no cut of its own has."""
    is_end = not any(part.isdigit() for part in pair.module.split("."))
    rows, columns = pair.weight_shape
    return is_end and columns == found[1] and (rows > found[0] or found[0] % rows != 0)


def _check_fits_stack(
    adapter: AdapterFiles, pair: FactorPair, weight_shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Some stack of the module has to fit: a file does not say which of them a pair belongs to."""
    owner = pair.module
    while owner.endswith(".base_layer"):
        owner = owner.removesuffix(".base_layer")
    stacks = [tuple(s) for n, s in weight_shapes.items() if n.rpartition(".")[0] == owner]
    wanted = (pair.num_matrices, *sorted(pair.weight_shape))
    if not any(len(s) == 3 and (s[0], *sorted(s[1:])) == wanted for s in stacks):
        raise ArtifactError(
            f"{adapter.folder}: {pair.a} {list(adapter.shapes[pair.a])} and {pair.b} "
            f"{list(adapter.shapes[pair.b])} are for {pair.num_matrices} experts of "
            f"{list(pair.weight_shape)}, {owner} of the base has {[list(s) for s in stacks]}; name "
            "the base that this adapter was trained on"
        )
