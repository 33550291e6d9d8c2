"""Prefixes of modules under other names, as another variant of the same base has them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tplora.errors import ArtifactError
from tplora.saved.keys import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tplora.artifact.convert.layers import LoadedAdapter

__all__ = ["check_prefixes", "rename"]

Kept = TypeVar("Kept")


def rename(adapter: LoadedAdapter, prefixes: Mapping[str, str]) -> LoadedAdapter:
    """Replace the beginning of modules' names; of several that fit, the longest.

    Args:
        adapter: Any.
        prefixes: Old to new, in the base's own names, as ``model.language_model.`` to ``model.``.

    Raises:
        ArtifactError: If two tensors would have one name.
    """
    config = copy.deepcopy(adapter.config)
    layers = _unique((_new(name, prefixes), one) for name, one in adapter.layers.items())
    rest = _unique(
        (PREFIX + _new(key.removeprefix(PREFIX), prefixes) if key.startswith(PREFIX) else key, one)
        for key, one in adapter.rest.items()
    )
    for field in ("target_modules", "modules_to_save", "target_parameters"):
        named = getattr(config, field)
        if named and not isinstance(named, str):  # a pattern is written anew, with all targets
            setattr(config, field, type(named)(_new(name, prefixes) for name in named))
    if isinstance(config.trainable_token_indices, dict):
        found = config.trainable_token_indices.items()
        config.trainable_token_indices = {_new(name, prefixes): ids for name, ids in found}
    return replace(adapter, config=config, layers=layers, rest=rest)


def check_prefixes(adapters: Sequence[LoadedAdapter], prefixes: Mapping[str, str]) -> None:
    """Refuse a prefix that fits nothing.

    Raises:
        ArtifactError: With names that there are.
    """
    names = [name for one in adapters for name in one.layers]
    names += [key.removeprefix(PREFIX) for one in adapters for key in one.rest]
    for old, new in prefixes.items():
        if not any(name.startswith(old) for name in names):
            raise ArtifactError(
                f"--rename {old}={new}: no module of {adapters[0].folder} begins so; it has "
                f"{', '.join(sorted(names)[:2])}, ..."
            )


def _new(name: str, prefixes: Mapping[str, str]) -> str:
    fitting = [old for old in prefixes if name.startswith(old)]
    if not fitting:
        return name
    old = max(fitting, key=len)
    return prefixes[old] + name.removeprefix(old)


def _unique(pairs: Iterable[tuple[str, Kept]]) -> dict[str, Kept]:
    found: dict[str, Kept] = {}
    for name, kept in pairs:
        if name in found:
            raise ArtifactError(f"--rename: two tensors would be called {name}; rename the other")
        found[name] = kept
    return found
