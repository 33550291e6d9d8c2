"""Which base an adapter was trained on, told by a few of its numbers: shapes are many models' own.

Of every kind of weight the first, the middle and the last layer's, and of each some values on its
diagonal, as the base's files hold them, whatever the model was cut over. A base in another dtype
is the same one if its numbers are the same to that dtype's rounding.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers import __version__ as transformers_version

from tplora.base.checkpoint_files import find_safetensors
from tplora.errors import ArtifactError
from tplora.saved.files import find_file, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["BASE", "base_difference", "check_same_base", "take_fingerprint"]

BASE = "base_fingerprint.json"
"""Beside an adapter: the fingerprint of what it was trained on."""

_NUM_VALUES = 8
_NUMBER = re.compile(r"\.\d+(?=\.)")
_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
# What decides a model's numbers and shows in no tensor.
_SETTINGS = (
    "model_type", "hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "head_dim",
    "num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "rope_parameters",
    "sliding_window", "attention_bias",
)  # fmt: skip


def take_fingerprint(path: str, revision: str | None = None) -> Mapping[str, Any] | None:
    """The fingerprint of a base's files; None where they are not safetensors, or are gone.

    Args:
        path: A folder, or a hub id whose files are cached.
        revision: Of the hub id.
    """
    if not path:
        return None
    try:
        files = find_safetensors(path, {"revision": revision})
        tensors = dict(_read_samples(files))
        settings = _settings(path, revision)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    if not tensors:
        return None
    return {"transformers": transformers_version, "settings": settings, "tensors": tensors}


def check_same_base(folder: Path, base: str, *, revision: str | None = None) -> None:
    """Refuse a base that is not the one that the adapter in ``folder`` was trained on.

    Where the folder holds no fingerprint, as those of other tools, there is nothing to compare.

    Args:
        folder: An adapter's.
        base: What ``from_pretrained`` gets.
        revision: Of a hub id.

    Raises:
        ArtifactError: Naming what differs.
    """
    if find_file(folder, [BASE]) is None:
        return
    saved, found = read_json(folder / BASE), take_fingerprint(base, revision)
    if found is None:
        return
    difference = base_difference(saved, found, where=str(folder / BASE))
    if difference is not None:
        raise ArtifactError(
            f"{folder}: was trained on another base than {base}: {difference}; name the base that "
            f"it was trained on, or remove {folder / BASE} if this one is meant"
        )


def base_difference(
    saved: Mapping[str, Any], found: Mapping[str, Any], *, where: str
) -> str | None:
    """How two fingerprints differ; None where they are of one base as far as can be told.

    Raises:
        ArtifactError: If ``saved`` is none.
    """
    try:
        pairs = {
            name: (saved["tensors"][name], found["tensors"][name]) for name in _common(saved, found)
        }
        changed = [name for name, pair in pairs.items() if not _is_same(*pair)]
        is_comparable = saved["transformers"] == found["transformers"]
        is_set_alike = saved["settings"] == found["settings"] or not is_comparable
    except (TypeError, KeyError, ValueError, AttributeError, struct.error):
        raise ArtifactError(
            f"{where}: is no fingerprint of a base; save the adapter again"
        ) from None
    if changed:
        return f"of {len(pairs)} weights looked at {len(changed)} differ, such as {changed[0]}"
    return None if is_set_alike else "its config gives the same weights other settings"


def _common(saved: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    return sorted(saved["tensors"].keys() & found["tensors"].keys())


def _is_same(saved: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """To the rounding of the dtypes where these differ; packed weights are not compared."""
    if list(saved["shape"])[1:] != list(found["shape"])[1:]:
        return False
    dtypes = {str(saved["dtype"]), str(found["dtype"])}
    is_other_form = len(dtypes) > 1 and not dtypes <= _DTYPES.keys()
    if list(saved["shape"]) != list(found["shape"]) or is_other_form:
        return True  # more tokens, or packed
    eps = 0.0 if len(dtypes) == 1 else max(torch.finfo(_DTYPES[name]).eps for name in dtypes)
    pairs = zip(_values(saved), _values(found), strict=True)
    return all(abs(a - b) <= eps * max(abs(a), abs(b)) + eps * 1e-3 for a, b in pairs)


def _values(one: Mapping[str, Any]) -> tuple[float, ...]:
    data = bytes.fromhex(one["values"])
    return struct.unpack(f"<{len(data) // 8}d", data)


def _settings(path: str, revision: str | None) -> str:
    config = AutoConfig.from_pretrained(path, revision=revision, local_files_only=True)
    values = config.get_text_config().to_dict()
    chosen = {name: values[name] for name in _SETTINGS if name in values}
    text = json.dumps(chosen, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_samples(files: Mapping[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    by_file: dict[Path, list[str]] = {}
    for name in _sample(files):
        by_file.setdefault(files[name], []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name in names:
                yield name, _read_sample(opened.get_slice(name))


def _sample(names: Iterable[str]) -> list[str]:
    """Of each kind the first, the middle and the last."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub(".*", name), []).append(name)
    found = []
    for kind in kinds.values():
        kind.sort(key=lambda name: [int(part[1:]) for part in _NUMBER.findall(name)])
        found += [kind[0], kind[len(kind) // 2], kind[-1]]
    return sorted(set(found))


def _read_sample(piece: Any) -> dict[str, Any]:
    shape = list(piece.get_shape())
    values, dtype = [], ""
    for number in range(_NUM_VALUES if shape and min(shape) > 0 else 0):
        places = tuple(number * (size - 1) // (_NUM_VALUES - 1) for size in shape)
        one = piece[tuple(slice(place, place + 1) for place in places)]
        dtype = str(one.dtype).removeprefix("torch.")
        values.append(float(one.double().reshape(())))
    return {
        "dtype": dtype,
        "shape": shape,
        "values": struct.pack(f"<{len(values)}d", *values).hex(),
    }
