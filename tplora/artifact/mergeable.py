"""Which adapters can be merged tensor by tensor; the others are refused by the field's name."""

from collections.abc import Collection
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from peft import LoraConfig

from tplora.artifact.adapter_dir import AdapterFiles
from tplora.errors import ArtifactError

__all__ = [
    "INITS_THAT_LEAVE_THE_BASE",
    "can_merge_into",
    "check_mergeable",
    "check_saved",
    "field_beyond_matrices",
    "name_mismatch",
    "unmergeable_field",
]

# Used in the merge, or without influence on what the adapter computes once it is trained.
_UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_bias", "lora_dropout", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_bdlora",
    "use_dora", "use_rslora", "kasa_config",
}  # fmt: skip
# The other ways to initialise change the base's weights as well (PiSSA, OLoRA, LoftQ, CorDA ...).
INITS_THAT_LEAVE_THE_BASE = (True, False, "gaussian", "orthogonal", "mica", "eva")


_NEVER = ("alora_invocation_tokens", "arrow_config", "monteclora_config", "use_qalora")


def unmergeable_field(config: LoraConfig) -> str | None:
    """The field for which no adapter of ``config`` can be merged into files, or None."""
    return next((name for name in _NEVER if getattr(config, name)), None)


def can_merge_into(target: Path, adapter: Path) -> bool:
    """Whether a merge would have something to do, and its adapter is of a kind that can be."""
    config = LoraConfig.from_pretrained(str(adapter))
    return not target.exists() and unmergeable_field(config) is None


def field_beyond_matrices(config: LoraConfig, *, but: Collection[str] = ()) -> str | None:
    """The field by which an adapter is more than changes of the base's own tensors, or None.

    Args:
        config: Of the adapter.
        but: Fields that do not matter to the caller.
    """
    for field in LoraConfig.__dataclass_fields__.values():
        value = getattr(config, field.name)
        if field.name == "init_lora_weights":
            is_plain = value in INITS_THAT_LEAVE_THE_BASE
        else:
            is_known = field.name in _UNDERSTOOD or field.name in but
            is_plain = is_known or not value or value == _default(field)
        if not is_plain:
            return str(field.name)
    return None


def check_mergeable(adapter: AdapterFiles, *, is_alone: bool = True) -> None:
    """Refuse what cannot be merged exactly.

    Args:
        adapter: To be merged.
        is_alone: Whether no other adapter is merged with it.

    Raises:
        ArtifactError: If the config asks for what is no change of single tensors.
    """
    field = field_beyond_matrices(adapter.config)
    if field is not None:
        raise ArtifactError(
            f"{adapter.folder}/adapter_config.json: {field} = {getattr(adapter.config, field)!r} "
            "cannot be merged into files; use the adapter unmerged"
        )
    for name in ("bias", "kasa_config"):
        value = getattr(adapter.config, name)
        if not is_alone and value not in (None, "none"):
            raise ArtifactError(
                f"{adapter.folder}/adapter_config.json: {name} = {value!r} changes the base for "
                "every other adapter as well; merge it alone"
            )
    problem = _config_problem(adapter)
    if problem:
        raise ArtifactError(f"{adapter.folder}: {problem}; use the adapter unmerged")


def _config_problem(adapter: AdapterFiles) -> str | None:
    """A tensor that the config does not account for, or one that it does and that is not there."""
    config = adapter.config
    for field, what in (("use_dora", "magnitude"), ("lora_bias", "bias")):
        for pair in adapter.pairs:
            key = getattr(pair, what)
            if (key is None) == bool(getattr(config, field)):
                found = f"{pair.module} has none" if key is None else f"it holds {key}"
                return f"{field} is {getattr(config, field)}, but {found}"
    if adapter.trained_tokens and config.trainable_token_indices is None:
        return "it holds rows of tokens, but trainable_token_indices names none"
    return None


def _is_accounted_for(config: LoraConfig, name: str) -> bool:
    """Whether PEFT would load the tensor: a module to save, a bias, a resized embedding or head."""
    module, _, leaf = name.rpartition(".")
    if leaf == "bias" and config.bias != "none":
        return True
    parts = module.split(".")
    ends = [".".join(parts[:k]) for k in range(1, len(parts) + 1)]  # a saved module may hold others
    if any(end.endswith(saved) for end in ends for saved in config.modules_to_save or ()):
        return True
    return not any(part.isdigit() for part in parts)  # PEFT saves adapted ends with their own


def check_saved(adapter: AdapterFiles) -> None:
    """Refuse a tensor that PEFT would put in the base's place and no option has asked for.

    Raises:
        ArtifactError: With its key.
    """
    for name, key in adapter.others.items():
        is_factor = adapter.config.kasa_config is not None and name.endswith(".lora_diag")
        if not (is_factor or _is_accounted_for(adapter.config, name)):
            raise ArtifactError(
                f"{adapter.folder}: {key} is no factor of LoRA, and its config names no such part; "
                "use the adapter unmerged"
            )


def name_mismatch(folder: Path, wanted: str, names: Collection[str]) -> ArtifactError:
    """The error for a tensor that the base's files do not hold under its own name."""
    module = wanted.rpartition(".")[0]
    parts = wanted.split(".")
    tails = [".".join(parts[k:]) for k in range(1, len(parts) - 1)]
    near = next(
        (
            name
            for tail in tails
            for name in sorted(names)
            if name == tail or name.endswith(f".{tail}")
        ),
        None,
    )
    where = f"{folder}: adapts {module}, but the base's files hold no {wanted}"
    if near is None:
        return ArtifactError(f"{where}; name the base that this adapter was trained on")
    return ArtifactError(
        f"{where}; they hold {near}: the adapter was trained on a model whose modules carry "
        "another prefix; merge into that model, or rename the adapter's tensors"
    )


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
