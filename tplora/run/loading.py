"""A recipe's model on this rank, and the arguments of its trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trl import SFTConfig

from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.base.load import check_shards, load_base
from tplora.base.resize import resize_tokens
from tplora.plan.lora import started_from
from tplora.plan.quantization import build_quantization_config
from tplora.run.vocabulary import set_up_adapter
from tplora.train.parallelism import parallelism_config

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tplora.adapter.model import TploraModel
    from tplora.base.source import ModelSource
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe

__all__ = ["load_model", "training_arguments"]


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
    seed: int = recipe.train.get("seed", SFTConfig.seed)
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
    )
    start = recipe.lora.get("adapter_name_or_path")
    if start is not None:
        load_factors(model, started_from(start))
    return model


def _loading(recipe: Recipe, source: ModelSource) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that the recipe gives and the source has not settled."""
    names = ["dtype", "trust_remote_code", "attn_implementation", "subfolder"]
    if not source.is_local:
        names += ["revision", "cache_dir", "local_files_only"]
    given = recipe.model.model_dump(include=set(names), exclude_none=True)
    quantization = build_quantization_config(recipe.quantization)
    return given if quantization is None else given | {"quantization_config": quantization}


def training_arguments(
    recipe: Recipe,
    model: TploraModel,
    folder: Path,
    device: torch.device,
    *,
    resume: bool = False,
) -> SFTConfig:
    """The recipe's ``[train]`` with what a run needs beside it."""
    # What was evaluated before the first step is not evaluated before a later one.
    settings = {"report_to": "none"} | recipe.train | ({"eval_on_start": False} if resume else {})
    return SFTConfig(
        **settings,
        output_dir=str(folder),
        parallelism_config=parallelism_config(model),
        use_cpu=device.type == "cpu",
        disable_tqdm=True,
        log_level="error",
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding",
        logging_nan_inf_filter=False,
    )
