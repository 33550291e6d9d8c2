"""A PEFT adapter folder: its config, and its tensors read one at a time and checked by name.

Nobody downstream notices an adapter that is empty, not finite or cut like a shard: it loads, and
the model behaves like the base or like noise. So it is refused here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open

from tplora.artifact.adapter_keys import sort_keys
from tplora.artifact.tensor_file import DTYPES
from tplora.errors import ArtifactError

__all__ = ["AdapterFiles", "FactorPair", "check_fits_base", "read_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor in the file."""
    pairs: tuple[FactorPair, ...]
    saved_bases: Mapping[str, str]
    """Module to key of a copy of its base weight; PEFT adds it for adapted embeddings and heads."""
    trained_tokens: Mapping[str, str]
    """Module to key of the rows of the tokens that were trained, as whole rows."""
    others: Mapping[str, str]
    """Parameter of the base, by its own name, to key of what takes its place."""

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
    def dtypes(self) -> set[torch.dtype]:
        """What the factors are written in."""
        with safe_open(self.folder / _WEIGHTS, framework="pt") as file:
            names = {file.get_slice(key).get_dtype() for key in self.shapes}
        return {DTYPES[name] for name in names if name in DTYPES}

    def tensor(self, key: str) -> torch.Tensor:
        """Read one tensor."""
        with safe_open(self.folder / _WEIGHTS, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor


def read_adapter(folder: Path) -> AdapterFiles:
    """Read and check an adapter folder; every tensor is read once, one at a time.

    Raises:
        ArtifactError: If a file is missing or damaged, or a tensor is empty, not finite, without
            its partner, or of another r than its partner or the config says.
    """
    config = _read_config(folder)
    shapes = _read_shapes(folder)
    keys = sort_keys(shapes)
    for key, shape in shapes.items():
        if math.prod(shape) == 0:
            raise ArtifactError(
                f"{folder / _WEIGHTS}: {key} is empty, shape {list(shape)}; save the adapter again"
            )
    adapter = AdapterFiles(
        folder=folder,
        config=config,
        shapes=shapes,
        pairs=tuple(
            _pair(folder, config, shapes, module, found) for module, found in keys.factors.items()
        ),
        saved_bases=keys.saved_bases,
        trained_tokens=keys.trained_tokens,
        others=keys.others,
    )
    is_known = any(name != key for name, key in adapter.others.items())
    if not (adapter.pairs or adapter.trained_tokens or is_known):
        raise ArtifactError(f"{folder / _WEIGHTS}: holds no LoRA factor; save the adapter again")
    _check_finite(adapter)
    return adapter


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
            raise ArtifactError(
                f"{adapter.folder}: {pair.a} belongs to {pair.module}, which the base does not "
                "have; name the base that this adapter was trained on"
            )
        if tuple(found) != pair.weight_shape:
            raise ArtifactError(
                f"{adapter.folder}: {pair.a} {list(adapter.shapes[pair.a])} and {pair.b} "
                f"{list(adapter.shapes[pair.b])} make a weight {list(pair.weight_shape)}, "
                f"{pair.module} of the base has {list(found)}; a factor that is a shard of the "
                "full one was saved, or this is another base"
            )


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


def _read_config(folder: Path) -> LoraConfig:
    path = folder / _CONFIG
    if not path.is_file():
        raise ArtifactError(f"{folder}: holds no {_CONFIG}; name the folder of a PEFT adapter")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path}: is not JSON ({error}); save the adapter again") from None
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        found = values.get("peft_type") if isinstance(values, dict) else values
        raise ArtifactError(f"{path}: peft_type is {found!r}; 'LORA' is needed")
    known = {name: value for name, value in values.items() if name in _config_fields()}
    unknown = {name: value for name, value in values.items() if name not in known and value}
    if unknown:
        raise ArtifactError(
            f"{path}: {', '.join(sorted(unknown))} not known to the installed peft; "
            "install the peft that wrote it"
        )
    return LoraConfig(**known)


def _config_fields() -> set[str]:
    return set(LoraConfig.__dataclass_fields__)


def _read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    path = folder / _WEIGHTS
    if not path.is_file():
        others = ", ".join(sorted(file.name for file in folder.iterdir()))
        raise ArtifactError(f"{folder}: holds no {_WEIGHTS} but {others}; save the adapter again")
    try:
        with safe_open(path, framework="pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
    except SafetensorError as error:
        raise ArtifactError(f"{path}: is damaged ({error}); save the adapter again") from error


def _pair(
    folder: Path,
    config: LoraConfig,
    shapes: Mapping[str, tuple[int, ...]],
    module: str,
    found: Mapping[str, str],
) -> FactorPair:
    path = folder / _WEIGHTS
    for factor, partner in (("A", "B"), ("B", "A")):
        if factor not in found:
            raise ArtifactError(
                f"{path}: {_first(found, partner)} has no lora_{factor} beside it; save the "
                "adapter again"
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
            raise ArtifactError(
                f"{path}: {key} has shape {list(shapes[key])}, dim {dim} has to be r = {r} as in "
                f"{_CONFIG}; a shard or another run's tensor was saved, save the adapter again"
            )
    is_embedding = a.endswith(".lora_embedding_A")
    out_features, in_features = whole[b][0], whole[a][1]
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
    with safe_open(adapter.folder / _WEIGHTS, framework="pt") as file:
        for key in adapter.shapes:
            bad = int((~torch.isfinite(file.get_tensor(key))).sum())
            if bad:
                raise ArtifactError(
                    f"{adapter.folder / _WEIGHTS}: {key} has {bad} values that are not finite; "
                    "take an earlier checkpoint"
                )
