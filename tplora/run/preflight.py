"""What can be known of a run before any process starts: its plan and its rows."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from transformers.integrations import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from trl import SFTConfig

from tplora.adapter.card import is_hub_id
from tplora.artifact.mergeable import unmergeable_field
from tplora.artifact.push import check_hub
from tplora.base.fingerprint import BASE, check_same_base
from tplora.base.source import ModelSource, resolve_model
from tplora.errors import HubError, PlanError
from tplora.plan.build import Plan, build_plan
from tplora.plan.initial import alone_problem
from tplora.plan.lora import started_from
from tplora.plan.packing import joined_rows_problem
from tplora.plan.quantization import build_quantization_config
from tplora.recipe.packing_rules import joins_rows
from tplora.recipe.schema import Recipe
from tplora.run.vocabulary import AdapterSetup, load_tokenizer, set_up_adapter
from tplora.saved.config import CONFIG
from tplora.train.data import TokenizedRows, check_enough_rows, tokenize_rows
from tplora.train.packing import pack_rows
from tplora.train.rows import read_rows

__all__ = ["check_upload", "plan_recipe", "tokenize_recipe_rows"]

# The default of every config of trl's.
_MAX_LENGTH = 1024
_UNDER_AUTOCAST = ("float32", "bfloat16")


def plan_recipe(
    recipe: Recipe, *, tp_size: int, progress: Callable[[str], None] = lambda message: None
) -> Plan:
    """The plan of a recipe's model and adapter; fetches the model if need be, reads no weight.

    Args:
        recipe: A checked recipe.
        tp_size: Ranks of the tensor-parallel group; the recipe may leave it to the machine.
        progress: Called with one line before each long step.

    Raises:
        SourceError: If the model cannot be had.
        PlanError: If it cannot be cut exactly.
    """
    source = resolve_model(recipe.model, recipe_folder=recipe.path.parent, progress=progress)
    setup = set_up_adapter(recipe, source)
    _check_start(recipe, source, setup)
    plan = build_plan(
        setup.config,
        setup.lora,
        tp_size=tp_size,
        dtype=recipe.model.dtype,
        quantization=build_quantization_config(recipe.quantization),
        trust_remote_code=recipe.model.trust_remote_code,
        sequence_parallel=recipe.parallel.sequence_parallel,
    )
    problems = [
        *_checkpointing_problems(recipe, setup),
        *_merge_problems(recipe, setup),
        *_reference_problems(recipe, setup),
        *_tracker_problems(recipe),
        *_joined_rows_problems(recipe, setup),
        *_autocast_problems(recipe, plan),
    ]
    if problems:
        raise PlanError(problems)
    return plan


def check_upload(recipe: Recipe) -> None:
    """Ask the hub whether it will take the adapter, if that is to be uploaded in the end.

    Raises:
        HubError: If it cannot be reached, or would refuse.
    """
    repo = recipe.export.push_to_hub
    if repo is not None:
        try:
            check_hub(repo, private=recipe.export.hub_private_repo)
        except HubError as error:
            raise HubError(
                f"export.push_to_hub: {error}; or leave it out, and `tplora push` the run later"
            ) from None


def _check_start(recipe: Recipe, source: ModelSource, setup: AdapterSetup) -> None:
    """An adapter to start from was trained on this base, as far as its folder tells."""
    start = recipe.lora.get("adapter_name_or_path")
    if start is None:
        return
    folder = started_from(start)
    if (folder / BASE).is_file():
        revision = None if source.is_local else recipe.model.revision
        check_same_base(folder, source.path, revision=revision)
        return
    named, here = str(setup.lora.base_model_name_or_path or ""), source.name
    if is_hub_id(named) and is_hub_id(here) and named.lower() != here.lower():
        raise PlanError(
            [
                f"lora.adapter_name_or_path = {start!r}: was trained on {named}, "
                f"model.pretrained_model_name_or_path is {here}; name that, or if both are one "
                f"base, write {here} into {folder / CONFIG}"
            ]
        )


def _checkpointing_problems(recipe: Recipe, setup: AdapterSetup) -> list[str]:
    if setup.lora.alora_invocation_tokens and recipe.train.get("activation_checkpointing", True):
        return [
            "train.activation_checkpointing = true: peft does not run aLoRA with it; set "
            "train.activation_checkpointing = false"
        ]
    return []


def _joined_rows_problems(recipe: Recipe, setup: AdapterSetup) -> list[str]:
    if not joins_rows(recipe.train):
        return []
    key = "packing" if recipe.train.get("packing") else "padding_free"
    problem = joined_rows_problem(setup.config, setup.lora, recipe.model.attn_implementation)
    return [f"train.{key} = true: {problem}; set train.{key} = false"] if problem else []


def _autocast_problems(recipe: Recipe, plan: Plan) -> list[str]:
    """What was not compared under autocast."""
    if not recipe.train.get("bf16"):
        return []
    if plan.quantization is not None:
        return ["train.bf16 = true: a quantised layer multiplies in its own dtype; leave it out"]
    if plan.base_dtype not in _UNDER_AUTOCAST:
        return [
            f"train.bf16 = true: the base is held in {plan.base_dtype}; set model.dtype to one of "
            f"{', '.join(_UNDER_AUTOCAST)}"
        ]
    return []


def _tracker_problems(recipe: Recipe) -> list[str]:
    asked = recipe.train.get("report_to", "none")
    names = [asked] if isinstance(asked, str) else asked
    there = {*get_available_reporting_integrations(), "all", "none"}
    known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
    return [
        f'train.report_to = "{name}": '
        + (f"is not installed here: pip install {name}" if name in known else f"is none of {known}")
        for name in names
        if name not in there
    ]


def _reference_problems(recipe: Recipe, setup: AdapterSetup) -> list[str]:
    """What cannot be copied into the frozen adapter that preferences are learned against."""
    if recipe.method not in ("dpo", "kto"):
        return []
    problem, lora = alone_problem(setup.lora, [setup.lora]), setup.lora
    if lora.bias != "none":
        problem = f"lora.bias = {lora.bias!r}: the base's biases are trained in place"
    if problem is None:
        return []
    return [
        f'train.method = "{recipe.method}" needs a second adapter, frozen, to compare with, and '
        f"{problem.partition(', which')[0]}; leave it out"
    ]


def _merge_problems(recipe: Recipe, setup: AdapterSetup) -> list[str]:
    field = unmergeable_field(setup.lora)
    if field is None or not recipe.export.merged:
        return []
    return [
        f"export.merged = true: an adapter with {field} cannot be merged into files; set "
        "export.merged = false and use the adapter"
    ]


def tokenize_recipe_rows(
    recipe: Recipe, keys: Sequence[str] = ("data.train", "data.eval")
) -> Iterator[TokenizedRows]:
    """A recipe's training rows, then its evaluation rows if it has any, as they will be trained on.

    Args:
        recipe: A checked recipe.
        keys: Which of them.

    Raises:
        DataError: If they cannot be.
    """
    folder = recipe.path.parent
    source = resolve_model(recipe.model, recipe_folder=folder)
    tokenizer = load_tokenizer(recipe, source)
    named = {"data.train": recipe.data.train, "data.eval": recipe.data.eval}
    for key, spec in named.items():
        if spec is None or key not in keys:
            continue
        rows = tokenize_rows(
            read_rows(spec, folder=folder, key=key),
            tokenizer,
            max_length=recipe.train.get("max_length", _MAX_LENGTH),
            assistant_only_loss=recipe.data.assistant_only_loss,
            completion_only_loss=recipe.train.get("completion_only_loss") is not False,
            method=recipe.method,
            key=key,
        )
        if key == "data.train":
            check_enough_rows(
                _num_packs(recipe, rows),
                rows_per_step=_rows_per_step(recipe),
                key=key,
                unit="packs" if recipe.train.get("packing") else "rows",
            )
        yield rows


def _num_packs(recipe: Recipe, rows: TokenizedRows) -> int:
    """What a micro-batch is made of: packs where rows are packed, otherwise rows."""
    if not recipe.train.get("packing"):
        return rows.num_rows
    return len(pack_rows(rows.dataset, recipe.train.get("max_length", _MAX_LENGTH)))


def _rows_per_step(recipe: Recipe) -> int:
    """Rows of one optimizer step, of all copies; the ranks of a tp group share them."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    usual = {field.name: field.default for field in dataclasses.fields(SFTConfig)}
    sizes = [int(recipe.train.get(name, usual[name])) for name in names]
    data_size = recipe.parallel.fsdp_size * recipe.parallel.dp_replicate_size
    return sizes[0] * sizes[1] * data_size
