"""Which adapters are exactly W + scaling * B @ A; the others are refused by the field's name."""

from collections.abc import Collection
from dataclasses import MISSING, Field
from typing import Any

from peft import LoraConfig

from tplora.artifact.adapter_dir import AdapterFiles
from tplora.errors import ArtifactError

__all__ = ["check_mergeable", "name_mismatch"]

# Used in the merge, or without influence on what the adapter computes once it is trained.
_UNDERSTOOD = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
# The other ways to initialise change the base's weights as well (PiSSA, OLoRA, LoftQ, CorDA ...).
_INITS_THAT_LEAVE_THE_BASE = (True, False, "gaussian", "orthogonal", "eva")


def check_mergeable(adapter: AdapterFiles) -> None:
    """Refuse what cannot be merged exactly. A parameter that is one matrix is merged like a module.

    Raises:
        ArtifactError: If the config asks for more than LoRA, or a tensor is no factor of LoRA.
    """
    for field in LoraConfig.__dataclass_fields__.values():
        value = getattr(adapter.config, field.name)
        if field.name == "init_lora_weights":
            is_plain = value in _INITS_THAT_LEAVE_THE_BASE
        else:
            is_plain = field.name in _UNDERSTOOD or not value or value == _default(field)
        if not is_plain:
            raise ArtifactError(
                f"{adapter.folder}/adapter_config.json: {field.name} = {value!r} cannot be merged; "
                "only plain LoRA is W + scaling * B @ A, use the adapter unmerged through peft"
            )
    stacked = [pair.module for pair in adapter.pairs if pair.num_matrices > 1]
    if stacked:
        raise ArtifactError(
            f"{adapter.folder}: adapts the experts {stacked[0]} and {len(stacked) - 1} more, which "
            "cannot be merged file by file yet; merge with peft's merge_and_unload, or use the "
            "adapter unmerged"
        )
    if adapter.others:
        raise ArtifactError(
            f"{adapter.folder}: {adapter.others[0]} is no factor of LoRA, "
            f"{len(adapter.others)} such tensors would be lost; use the adapter unmerged"
        )


def name_mismatch(adapter: AdapterFiles, module: str, names: Collection[str]) -> ArtifactError:
    """The error for a module whose weight the base's files do not hold under its own name."""
    wanted = f"{module}.weight"
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
    where = f"{adapter.folder}: adapts {module}, but the base's files hold no {wanted}"
    if near is None:
        return ArtifactError(f"{where}; name the base that this adapter was trained on")
    return ArtifactError(
        f"{where}; they hold {near}: their names carry another prefix than the model's modules; "
        "load the base with transformers, save it with save_pretrained(..., "
        "save_original_format=False) and merge into that"
    )


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
