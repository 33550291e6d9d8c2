"""The base that a finished run was trained on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BitsAndBytesConfig

from tplora.adapter.base_record import read_base_record
from tplora.base.fingerprint import check_same_base
from tplora.base.source import resolve_model
from tplora.errors import ArtifactError
from tplora.plan.quantization import build_quantization_config
from tplora.recipe.parse import load_recipe
from tplora.recipe.schema import ModelTable
from tplora.saved.config import read_saved_config

__all__ = ["Base", "find_base"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What to load, and in which dtype."""

    path: str
    """What ``from_pretrained`` gets: a folder or a hub id."""
    revision: str | None
    """Of a hub id."""
    dtype: torch.dtype
    """Of the weights, as in training."""
    quantization: BitsAndBytesConfig | None = None
    """How they are quantised on their way, as in training."""

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of ``from_pretrained``."""
        if self.quantization is None:
            return {}
        return {"quantization_config": self.quantization}


def find_base(
    run: Path,
    adapter: Path,
    *,
    named: str | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Base:
    """The base of a run: from its ``recipe.toml``, or of a bare adapter, from what lies beside it.

    That is PEFT's config, which names it, and tplora's record of how it was held, if there is one.

    Args:
        run: The run's folder.
        adapter: The adapter's folder.
        named: Folder or hub id of the base, if it is elsewhere now; it is held as in training.
        progress: Called with one line before each long step.

    Raises:
        ArtifactError: If a bare adapter does not say what its base is, its record is damaged, or
            what is there now is another base.
        RecipeError: If the run's recipe cannot be read.
        SourceError: If the base cannot be had any more.
    """
    kept = run / "recipe.toml"
    recipe = load_recipe(kept) if kept.is_file() else None
    if recipe is None:
        model, quantization = _recorded(adapter, named)
    else:
        model, quantization = recipe.model, build_quantization_config(recipe.quantization)
    if named is not None:
        model = ModelTable(pretrained_model_name_or_path=named, dtype=model.dtype)
    folder = run if named is None else Path()
    source = resolve_model(model, recipe_folder=folder, progress=progress)
    revision = None if source.is_local else model.revision
    check_same_base(adapter, source.path, revision=revision)
    dtype = _dtype(model.dtype, source.path, revision)
    return Base(path=source.path, revision=revision, dtype=dtype, quantization=quantization)


def _recorded(adapter: Path, named: str | None) -> tuple[ModelTable, BitsAndBytesConfig | None]:
    """What a bare adapter says of its base: its name, and how it was held."""
    model = ModelTable(pretrained_model_name_or_path=named) if named else _named_by(adapter)
    record = read_base_record(adapter)
    if record is None:
        return model, None
    return model.model_copy(update={"dtype": record.dtype}), record.quantization_config


def _named_by(adapter: Path) -> ModelTable:
    config = read_saved_config(adapter)
    name = config.base_model_name_or_path
    if not name:
        raise ArtifactError(
            f"{adapter / 'adapter_config.json'}: names no base; name its folder or hub id with "
            "--base, or write it into base_model_name_or_path"
        )
    return ModelTable(pretrained_model_name_or_path=name, revision=config.revision)


def _dtype(asked: str, path: str, revision: str | None) -> torch.dtype:
    """``"auto"`` is what the base's own config says, as in ``from_pretrained``."""
    if asked == "auto":
        found = AutoConfig.from_pretrained(path, revision=revision).dtype
    else:
        found = getattr(torch, asked)
    return found if isinstance(found, torch.dtype) else torch.float32
