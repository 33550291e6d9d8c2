"""The base that an adapter is to fit: its modules, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from tplora.artifact.adapter_dir import read_structure
from tplora.errors import ArtifactError
from tplora.upstream import build_meta_model
from tplora.upstream.peft_reading import adapters_on_meta

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PretrainedConfig

__all__ = ["TargetBase", "read_target_base"]

# Their qkv_proj has the rows of q, k and v in turns, head by head (transformers 5.24).
_INTERLEAVED = ("codegen", "minimax")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBase:
    """A base without weights."""

    name: str
    """Folder or hub id."""
    config: PretrainedConfig
    weights: Mapping[str, tuple[int, ...]]
    """Of each linear layer and embedding, ``[out, in]``."""

    @property
    def is_interleaved(self) -> bool:
        """Whether a fused projection is no plain stack of its parts."""
        return self.config.model_type in _INTERLEAVED

    def check_loads(self, folder: Path) -> None:
        """Put the adapter on the base as plain PEFT does, without weights.

        A base with fewer tokens than the adapter's gets them first, as it has to before training.

        Raises:
            ArtifactError: If PEFT finds less than the base's layers need, or more.
        """
        model = build_meta_model(self.config, trust_remote_code=False)
        num_tokens = read_structure(folder).num_tokens
        if num_tokens > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(num_tokens, mean_resizing=False)
        try:
            _, problems = adapters_on_meta(model, {"default": folder})
        except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as error:
            said = " ".join(str(error).split())[:300]
            raise ArtifactError(
                f"{self.name}: peft cannot put the adapter on this base ({said}); name the base "
                "that it is for"
            ) from error
        for names, what in zip(problems["default"], ("lacks", "has no place for"), strict=True):
            if names:
                raise ArtifactError(
                    f"{self.name}: this base {what} {names[0]} and {len(names) - 1} more of the "
                    "adapter's tensors; name the base that it is for"
                )


def read_target_base(name: str, *, revision: str | None = None) -> TargetBase:
    """Build a base's modules, without weights.

    Args:
        name: Folder, or hub id whose config is cached or can be fetched.
        revision: Of the hub id.

    Raises:
        ArtifactError: If transformers cannot.
    """
    try:
        config = AutoConfig.from_pretrained(name, revision=revision)
        model = build_meta_model(config, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ArtifactError(
            f"{name}: transformers cannot build this model ({str(error).partition(chr(10))[0]}); "
            "name the folder or the hub id of a base"
        ) from error
    weights = {
        module_name: tuple(module.weight.shape)[:: -1 if isinstance(module, Conv1D) else 1]
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D)
    }
    return TargetBase(name=name, config=config, weights=weights)
