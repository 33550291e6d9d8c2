"""One rank's part of a run, from the recipe to a verified adapter.

rows, plan -> base shards -> factors -> trl's trainer -> adapter, probe, picture -> verified
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback

from tplora.adapter.save import gather_factors, raise_everywhere, write_adapter
from tplora.artifact.probe import choose_probe_rows, record_probe
from tplora.base.source import ModelSource, resolve_model
from tplora.files import write_text_aside, written_aside
from tplora.mesh import (
    Processes,
    current_processes,
    join_process_group,
    leave_process_group,
    num_restarts,
)
from tplora.plan.axes import fill_world
from tplora.plan.quantization import build_quantization_config
from tplora.plan.report import plan_text
from tplora.run.base import Base
from tplora.run.begin import check_shared_folder, find_start
from tplora.run.card import card_details, card_facts, license_of
from tplora.run.finish import finish
from tplora.run.folder import PROBE, drop_the_end
from tplora.run.loading import load_model
from tplora.run.preflight import plan_recipe, tokenize_recipe_rows
from tplora.run.stage import Stage
from tplora.run.start import Start
from tplora.run.training import stopping_callbacks, training_arguments
from tplora.run.vocabulary import load_tokenizer
from tplora.train.kinds import TRAINERS, prepare_rows, sequence_of
from tplora.train.metrics import MetricsCallback, read_metrics
from tplora.train.packing import PACKED, say_packs
from tplora.train.picture import draw_loss
from tplora.train.preemption import StopsWhenAsked, asked_to_end
from tplora.train.preview import preview
from tplora.train.progress import TrainingProgress

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tplora.adapter.model import TploraModel
    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe
    from tplora.run.summary import RunSummary
    from tplora.train.data import TokenizedRows

__all__ = ["run_finetune"]


def run_finetune(recipe: Recipe, folder: Path, *, start: Start | None = None) -> RunSummary:
    """Train ``recipe`` and leave the run in ``folder``.

    Collective: every rank of the world calls it; the first rank writes and shows.

    Args:
        recipe: A checked recipe.
        folder: The run's folder, cleared or new; of a run that is resumed, as it was left.
        start: Whether to go on from the folder's last whole checkpoint, over any axes.

    Raises:
        PreemptedError: On every rank, if one got SIGTERM while training; a checkpoint is saved.
        TploraError: Whatever stops the run, on every rank; nothing half-written is left.
    """
    processes, start = current_processes(), start or Start()
    with asked_to_end() as asked:
        base, best_step = _run_ranks(recipe, folder, processes, start, asked)
    return finish(recipe, base, folder, processes, best_step)


def _run_ranks(
    recipe: Recipe, folder: Path, processes: Processes, start: Start, asked: threading.Event
) -> tuple[Base, int | None]:
    device = join_process_group(processes)
    try:
        keeps_log = start.goes_on or num_restarts() > 0
        with Stage(folder, asked, is_writer=processes.rank == 0, keeps_log=keeps_log) as stage:
            if processes.world_size > processes.local_world_size and _saves(recipe):
                check_shared_folder(folder)
            stage.checkpoint = find_start(folder, start, say=stage.say)
            source = resolve_model(recipe.model, recipe_folder=recipe.path.parent)
            axes = fill_world(processes.world_size, recipe.parallel)
            plan = plan_recipe(recipe, tp_size=axes.tp_size)
            _write_intent(stage, recipe, plan, axes)
            trained, tokenizer, best_step = _train(recipe, source, plan, device, stage)
            _save(recipe, trained, tokenizer, stage, best_step)
            dtype = trained.get_base_model().dtype
            del trained
            gc.collect()
    finally:
        leave_process_group()
    base = Base(
        path=source.path,
        revision=None if source.is_local else recipe.model.revision,
        dtype=dtype,
        quantization=build_quantization_config(recipe.quantization),
    )
    return base, best_step


def _saves(recipe: Recipe) -> bool:
    return bool(recipe.train.get("save_strategy", "no") != "no")


def _write_intent(stage: Stage, recipe: Recipe, plan: Plan, axes: Axes) -> None:
    if stage.is_writer:
        if stage.checkpoint is not None:
            stage.say(f"resumed from {stage.checkpoint}")
            drop_the_end(stage.folder)
        write_text_aside(stage.folder / "recipe.toml", recipe.to_toml(), overwrite=True)
        write_text_aside(stage.folder / "plan.txt", plan_text(plan, axes), overwrite=True)


def _train(
    recipe: Recipe, source: ModelSource, plan: Plan, device: torch.device, stage: Stage
) -> tuple[TploraModel, PreTrainedTokenizerBase, int | None]:
    tokenizer = load_tokenizer(recipe, source)
    rows = {tokenized.key: tokenized for tokenized in tokenize_recipe_rows(recipe)}
    for tokenized in rows.values():
        stage.say(tokenized.summary())
    stage.say("one row, with what is trained on in brackets:\n" + _preview(rows, tokenizer))
    model = load_model(recipe, source, plan, device)
    resume = stage.checkpoint is not None
    args = training_arguments(recipe, model, stage.folder, device, resume=resume)
    method = recipe.method
    ready = {
        key: prepare_rows(method, found.dataset, args, is_eval=key == "data.eval")
        for key, found in rows.items()
    }
    for key, found in ready.items():
        if PACKED in found.column_names:
            stage.say(f"{key}: {say_packs(found, args.max_length)}")
    shown = [stage.enter_context(TrainingProgress(console)) for console in stage.consoles]
    trainer = TRAINERS[method](
        model=model,
        args=args,
        train_dataset=ready["data.train"],
        eval_dataset=ready.get("data.eval"),
        processing_class=tokenizer,
        check_every_steps=recipe.parallel.check_every_steps,
        **{key: value for key, value in recipe.lora.items() if key.startswith("loraplus_")},
        callbacks=[
            StopsWhenAsked(stage.asked_to_end),
            MetricsCallback(
                stage.folder / "metrics.jsonl",
                tp_size=plan.tp_size,
                is_writer=stage.is_writer,
                progress=shown,
            ),
            *stopping_callbacks(recipe),
        ],
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=stage.checkpoint and str(stage.checkpoint))
    # What is compared in the end is computed without autocast, on both sides.
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    record_probe(
        model,
        choose_probe_rows(sequence_of(row) for row in _probe_rows(rows)),
        stage.folder / PROBE,
        is_writer=stage.is_writer,
    )
    return model, tokenizer, trainer.best_step


def _preview(rows: dict[str, TokenizedRows], tokenizer: PreTrainedTokenizerBase) -> str:
    return preview(rows["data.train"].dataset, tokenizer)


def _probe_rows(rows: dict[str, TokenizedRows]) -> Any:
    """Rows that were not trained on, where there are any."""
    return (rows.get("data.eval") or rows["data.train"]).dataset


def _save(
    recipe: Recipe,
    model: TploraModel,
    tokenizer: PreTrainedTokenizerBase,
    stage: Stage,
    best_step: int | None,
) -> None:
    """All of ``adapter/`` appears at once, and last: a run that has it is complete."""
    adapter, metrics = stage.folder / "adapter", stage.folder / "metrics.jsonl"
    factors = gather_factors(model, is_writer=stage.is_writer)
    problem = ""
    if stage.is_writer:
        try:
            draw_loss(metrics, stage.folder / "loss.png", title=recipe.name)
            model.card_facts = card_facts(recipe, read_metrics(metrics), best_step)
            model.card_details = card_details(
                recipe, (stage.folder / "plan.txt").read_text("utf-8")
            )
            model.card_license = license_of(str(model.get_base_model().config.name_or_path))
            with written_aside(adapter, overwrite=True) as aside:
                write_adapter(
                    model,
                    aside,
                    _rounded(factors, recipe.export.adapter_dtype),
                    adapter_names=["default"],  # not the frozen copy that DPO learns against
                )
                tokenizer.save_pretrained(aside)
        except Exception as error:  # whatever it is, the other ranks wait to be told
            problem = f"{adapter}: {error}".replace(f"{adapter}: {adapter}", str(adapter))
    raise_everywhere(problem)
    stage.say(f"adapter saved in {adapter}")


def _rounded(factors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    if dtype == "auto":
        return factors
    return {name: factor.to(getattr(torch, dtype)) for name, factor in factors.items()}
