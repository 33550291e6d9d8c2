"""A PEFT adapter folder: its config, and its tensors read one at a time and checked by name.

Nobody downstream notices an adapter that is empty, not finite or cut like a shard: it loads, and
the model behaves like the base or like noise. So it is refused here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from tplora.artifact.adapter_keys import sort_keys
from tplora.artifact.tensor_file import is_finite
from tplora.errors import ArtifactError
from tplora.saved.config import CONFIG, read_saved_config
from tplora.saved.tensors import SavedTensors, find_tensors

__all__ = ["AdapterFiles", "FactorPair", "read_adapter", "read_structure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorPair:
    """A and B of one module: ``delta weight = scaling * B @ A``, for an embedding its transpose."""

    module: str
    """As the base's own ``named_modules`` calls it."""
    a: str
    """Key of A, shape [r, in], in the file."""
    b: str
    """Key of B, shape [out, r], in the file."""
    is_embedding: bool
    scaling: float
    weight_shape: tuple[int, int]
    """Of the full weight that the pair belongs to, as the base stores it."""
    num_matrices: int
    """How many pairs are stacked in this one: the experts of a module, or 1."""
    magnitude: str | None = None
    """Key of DoRA's vector, shape [out]."""
    bias: str | None = None
    """Key of the bias of B, shape [out]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A checked adapter; only names and shapes are held."""

    folder: Path
    config: LoraConfig
    tensors: SavedTensors
    """By the keys that plain PEFT gives them."""
    pairs: tuple[FactorPair, ...]
    saved_bases: Mapping[str, str]
    """Module to key of a copy of its base weight; PEFT adds it for adapted embeddings and heads."""
    trained_tokens: Mapping[str, str]
    """Module to key of the rows of the tokens that were trained, as whole rows."""
    others: Mapping[str, str]
    """Parameter of the base, by its own name, to key of what takes its place."""
    problems: tuple[str, ...] = ()
    """Of modules whose factors make no pair, which are not among ``pairs``."""

    @property
    def num_tokens(self) -> int:
        """As many rows as embedding and head need for the adapter's tokens; 0 if none is named."""
        asked = self.config.trainable_token_indices or []
        lists = asked.values() if isinstance(asked, dict) else [asked]
        rows = [token + 1 for tokens in lists for token in tokens]
        rows += [
            self.shapes[key][0]
            for name, key in self.others.items()
            if name.endswith(".weight")
            and len(self.shapes[key]) == 2  # a norm is as long as the hidden size
            and not any(part.isdigit() for part in name.split("."))
        ]
        return max(rows, default=0)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the file."""
        return self.tensors.shapes

    @property
    def dtypes(self) -> set[torch.dtype]:
        """What the factors are written in."""
        return set(self.tensors.dtypes.values())

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor."""
        with self.tensors.open() as file:
            return file.tensor(key)


def read_adapter(folder: Path) -> AdapterFiles:
    """Read and check an adapter folder; every tensor is read once, one at a time.

    Raises:
        ArtifactError: If a file is missing or damaged, or a tensor is empty, not finite, without
            its partner, or of another r than its partner or the config says.
    """
    adapter = read_structure(folder)
    if adapter.problems:
        more = f" (and {len(adapter.problems) - 1} more)" if len(adapter.problems) > 1 else ""
        raise ArtifactError(f"{adapter.tensors.path}: {adapter.problems[0]}{more}")
    is_known = any(name != key for name, key in adapter.others.items())
    if not (adapter.pairs or adapter.trained_tokens or is_known):
        raise ArtifactError(f"{adapter.tensors.path}: holds no LoRA factor; save the adapter again")
    _check_finite(adapter)
    return adapter


def read_structure(folder: Path) -> AdapterFiles:
    """Read an adapter folder's config and shapes; what makes no pair is in ``problems``.

    Raises:
        ArtifactError: If a file is missing or damaged, or holds what no adapter does.
    """
    config, tensors = read_saved_config(folder), find_tensors(folder)
    keys = sort_keys(tensors.shapes)
    pairs, problems = [], []
    for module, found in keys.factors.items():
        try:
            pairs.append(_pair(config, tensors, module, found))
        except _UnpairedError as error:
            problems.append(str(error))
    return AdapterFiles(
        folder=folder,
        config=config,
        tensors=tensors,
        pairs=tuple(pairs),
        saved_bases=keys.saved_bases,
        trained_tokens=keys.trained_tokens,
        others=keys.others,
        problems=tuple(problems),
    )


class _UnpairedError(Exception):
    """Why the factors of a module make no pair."""


def _pair(
    config: LoraConfig, tensors: SavedTensors, module: str, found: Mapping[str, str]
) -> FactorPair:
    shapes = tensors.shapes
    for factor, partner in (("A", "B"), ("B", "A")):
        if factor not in found:
            raise _UnpairedError(
                f"{_first(found, partner)} has no lora_{factor} beside it; save the adapter again"
            )
    a, b = found["A"], found["B"]
    r = _by_pattern(config.rank_pattern, module, config.r)
    alpha = _by_pattern(config.alpha_pattern, module, config.lora_alpha)
    num_matrices = 1
    if config.target_parameters and len(shapes[a]) == 2 and shapes[a][0] % r == 0:
        num_matrices = max(1, shapes[a][0] // r)  # PEFT stacks the factors of a module's experts
    whole = _without_blocks(config, module, {key: shapes[key] for key in (a, b)}, a, b)
    for key, dim in ((a, 0), (b, 1)):
        if len(shapes[key]) != 2 or whole[key][dim] != r * num_matrices:
            raise _UnpairedError(
                f"{key} has shape {list(shapes[key])}, dim {dim} has to be r = {r} as in "
                f"{CONFIG}; a shard or another run's tensor was saved, save the adapter again"
            )
    is_embedding = a.endswith(".lora_embedding_A")
    out_features, in_features = whole[b][0], whole[a][1]
    _check_vectors(shapes, found, out_features)
    return FactorPair(
        module=module,
        a=a,
        b=b,
        is_embedding=is_embedding,
        scaling=alpha / math.sqrt(r) if config.use_rslora else alpha / r,
        weight_shape=(in_features, out_features) if is_embedding else (out_features, in_features),
        num_matrices=num_matrices,
        magnitude=found.get("magnitude"),
        bias=found.get("bias"),
    )


def _check_vectors(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, str], out_features: int
) -> None:
    for key in (found.get("magnitude"), found.get("bias")):
        if key is not None and shapes[key] != (out_features,):
            raise _UnpairedError(
                f"{key} has shape {list(shapes[key])}, [{out_features}] is needed as for "
                "the lora_B beside it; a shard was saved, save the adapter again"
            )


def _first(found: Mapping[str, str], usual: str) -> str:
    return found.get(usual) or next(iter(found.values()))


def _without_blocks(
    config: LoraConfig, module: str, shapes: dict[str, tuple[int, ...]], a: str, b: str
) -> dict[str, tuple[int, ...]]:
    """The shapes of A and B with BD-LoRA's zeros in them; PEFT chooses by a part of the name."""
    blocks = config.use_bdlora
    if not blocks or any(len(shape) != 2 for shape in shapes.values()):
        return shapes
    for key, patterns in ((a, blocks.target_modules_bd_a), (b, blocks.target_modules_bd_b)):
        if any(pattern in module for pattern in patterns or ()):
            rows, columns = shapes[key]
            return shapes | {key: (rows, columns * blocks.nblocks)}
    return shapes


def _by_pattern(pattern: Mapping[str, int], module: str, usual: int) -> int:
    """PEFT looks a module up by its name, or by its weight's where that was the target."""
    keys = (get_pattern_key(pattern.keys(), name) for name in (module, f"{module}.weight"))
    return next((pattern[key] for key in keys if key in pattern), usual)


def _check_finite(adapter: AdapterFiles) -> None:
    with adapter.tensors.open() as file:
        for key in adapter.shapes:
            tensor = file.tensor(key)
            if not is_finite(tensor):
                bad = int((~torch.isfinite(tensor)).sum())
                raise ArtifactError(
                    f"{adapter.tensors.path}: {key} has {bad} values that are not finite; take an "
                    "earlier checkpoint"
                )
