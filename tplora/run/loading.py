"""A recipe's model on this rank: its base, its adapter, and what the adapter starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainingArguments

from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.adapter.loftq import replace_lora_weights_loftq
from tplora.base.load import check_shards, load_base
from tplora.base.resize import resize_tokens
from tplora.plan.lora import started_from
from tplora.plan.quantization import build_quantization_config
from tplora.run.vocabulary import set_up_adapter

if TYPE_CHECKING:
    import torch

    from tplora.adapter.model import TploraModel
    from tplora.base.source import ModelSource
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe

__all__ = ["load_model"]


def load_model(
    recipe: Recipe, source: ModelSource, plan: Plan, device: torch.device
) -> TploraModel:
    """The recipe's base on this rank with its adapter, ready to train. Collective.

    Raises:
        TploraError: If what was loaded is not what was planned.
    """
    setup = set_up_adapter(recipe, source)
    sizes = recipe.parallel.model_dump(include={"fsdp_size", "dp_replicate_size"})
    options = _loading(recipe, source) | sizes
    base = load_base(source.path, tp_size=plan.tp_size, device=device, **options)
    seed: int = recipe.train.get("seed", TrainingArguments.seed)
    if setup.num_tokens is not None:
        resize_tokens(base, setup.num_tokens, seed=seed)
    check_shards(base, plan)
    lora = setup.lora
    lora.base_model_name_or_path = source.name
    lora.revision = None if source.is_local else recipe.model.revision
    model = attach_adapter(
        base,
        lora,
        seed=seed,
        plan=plan,
        autocast_adapter_dtype=recipe.lora.get("autocast_adapter_dtype", True),
        overlap_communication=recipe.parallel.overlap_communication,
    )
    if (start := recipe.lora.get("adapter_name_or_path")) is not None:
        load_factors(model, started_from(start))
    if recipe.lora.get("loftq"):
        replace_lora_weights_loftq(model, source.path)
    return model


def _loading(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that the recipe gives and the source has not settled."""
    names = ["dtype", "trust_remote_code", "attn_implementation", "subfolder"]
    if not source.is_local:
        names += ["revision", "cache_dir", "local_files_only"]
    given = recipe.model.model_dump(include=set(names), exclude_none=True)
    quantization = build_quantization_config(recipe.quantization)
    return given if quantization is None else given | {"quantization_config": quantization}
