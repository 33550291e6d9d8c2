"""One rank's part of a run, from the recipe to a verified adapter.

rows, plan -> base shards -> factors -> trl's trainer -> adapter, probe, picture -> verified
"""

from __future__ import annotations

import gc
from contextlib import ExitStack
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PrinterCallback

from tplora.adapter.save import save_adapter
from tplora.artifact.merge import merge_adapter
from tplora.artifact.mergeable import can_merge_into
from tplora.artifact.probe import choose_probe_rows, record_probe
from tplora.artifact.verify import VerifyReport, verify_adapter
from tplora.base.source import ModelSource, resolve_model
from tplora.errors import ArtifactError, TploraError
from tplora.files import write_text_aside
from tplora.mesh import Processes, current_processes, join_process_group, leave_process_group
from tplora.plan.axes import fill_world
from tplora.plan.quantization import build_quantization_config
from tplora.plan.report import plan_text
from tplora.run.card import card_facts
from tplora.run.folder import PROBE, drop_the_end
from tplora.run.loading import load_model, training_arguments
from tplora.run.preflight import plan_recipe, tokenize_recipe_rows
from tplora.run.summary import RunSummary
from tplora.run.vocabulary import load_tokenizer
from tplora.train.metrics import MetricsCallback, read_metrics
from tplora.train.picture import draw_loss
from tplora.train.preview import preview
from tplora.train.progress import TrainingProgress
from tplora.train.trainer import TploraSFTTrainer

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tplora.adapter.model import TploraModel
    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe
    from tplora.train.data import TokenizedRows

__all__ = ["run_finetune"]


def run_finetune(recipe: Recipe, folder: Path, *, resume: bool = False) -> RunSummary:
    """Train ``recipe`` and leave the run in ``folder``.

    Collective: every rank of the world calls it; the first rank writes and shows.

    Args:
        recipe: A checked recipe.
        folder: The run's folder, cleared or new; of a run that is resumed, as it was left.
        resume: Whether to go on from the folder's last whole checkpoint, over any
            axes.

    Raises:
        TploraError: Whatever stops the run, on every rank; nothing half-written is left.
    """
    processes = current_processes()
    device = join_process_group(processes)
    try:
        with _Stage(folder, is_writer=processes.rank == 0, resume=resume) as stage:
            source = resolve_model(recipe.model, recipe_folder=recipe.path.parent)
            axes = fill_world(processes.world_size, recipe.parallel)
            plan = plan_recipe(recipe, tp_size=axes.tp_size)
            _write_intent(stage, recipe, plan, axes)
            trained, tokenizer = _train(recipe, source, plan, device, stage)
            _save(recipe, trained, tokenizer, stage)
            dtype = trained.get_base_model().dtype
            del trained
            gc.collect()
    finally:
        leave_process_group()
    return _finish(recipe, source, plan, folder, processes, dtype)


class _Stage(ExitStack):
    """Where one rank writes and shows: the first one does, the others do neither."""

    def __init__(self, folder: Path, *, is_writer: bool, resume: bool) -> None:
        super().__init__()
        self.folder, self.is_writer, self.resume = folder, is_writer, resume
        self.consoles: list[Console] = []
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            mode = "a" if resume else "w"
            log = self.enter_context((folder / "log.txt").open(mode, encoding="utf-8"))
            self.consoles = [Console(), Console(file=log, width=120, force_terminal=False)]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool | None:
        """Keep in the log what ended the run; the terminal is told by whoever started it."""
        if error is not None and self.consoles:
            lines = [str(error)] if isinstance(error, TploraError) else format_exception(error)
            self.consoles[-1].print("".join(lines), markup=False, highlight=False, soft_wrap=True)
        return super().__exit__(kind, error, trace)

    def say(self, text: str) -> None:
        """Show a line on the terminal and keep it in the log."""
        for console in self.consoles:
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _write_intent(stage: _Stage, recipe: Recipe, plan: Plan, axes: Axes) -> None:
    if stage.is_writer:
        if stage.resume:
            drop_the_end(stage.folder)
        write_text_aside(stage.folder / "recipe.toml", recipe.to_toml(), overwrite=True)
        write_text_aside(stage.folder / "plan.txt", plan_text(plan, axes), overwrite=True)


def _train(
    recipe: Recipe, source: ModelSource, plan: Plan, device: torch.device, stage: _Stage
) -> tuple[TploraModel, PreTrainedTokenizerBase]:
    tokenizer = load_tokenizer(recipe, source)
    rows = {tokenized.key: tokenized for tokenized in tokenize_recipe_rows(recipe)}
    for tokenized in rows.values():
        stage.say(tokenized.summary())
    stage.say("one row, with what is trained on in brackets:\n" + _preview(rows, tokenizer))
    model = load_model(recipe, source, plan, device)
    args = training_arguments(recipe, model, stage.folder, device, resume=stage.resume)
    shown = [stage.enter_context(TrainingProgress(console)) for console in stage.consoles]
    trainer = TploraSFTTrainer(
        model=model,
        args=args,
        train_dataset=rows["data.train"].dataset,
        eval_dataset=rows["data.eval"].dataset if "data.eval" in rows else None,
        processing_class=tokenizer,
        check_every_steps=recipe.parallel.check_every_steps,
        **{key: value for key, value in recipe.lora.items() if key.startswith("loraplus_")},
        callbacks=[
            MetricsCallback(
                stage.folder / "metrics.jsonl",
                tp_size=plan.tp_size,
                is_writer=stage.is_writer,
                progress=shown,
            )
        ],
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=_find_checkpoint(trainer, stage))
    record_probe(
        model,
        choose_probe_rows(row["input_ids"] for row in _probe_rows(rows)),
        stage.folder / PROBE,
        is_writer=stage.is_writer,
    )
    return model, tokenizer


def _find_checkpoint(trainer: TploraSFTTrainer, stage: _Stage) -> str | None:
    """Where a resumed run goes on. Collective: the first rank looks."""
    if not stage.resume:
        return None
    found = trainer.last_checkpoint(say=stage.say)
    if found is None:
        raise ArtifactError(f"{stage.folder}: has no checkpoint to resume; start it again")
    stage.say(f"resumed from {found}")
    return str(found)


def _preview(rows: dict[str, TokenizedRows], tokenizer: PreTrainedTokenizerBase) -> str:
    return preview(rows["data.train"].dataset, tokenizer)


def _probe_rows(rows: dict[str, TokenizedRows]) -> Any:
    """Rows that were not trained on, where there are any."""
    return (rows.get("data.eval") or rows["data.train"]).dataset


def _save(
    recipe: Recipe, model: TploraModel, tokenizer: PreTrainedTokenizerBase, stage: _Stage
) -> None:
    adapter = stage.folder / "adapter"
    if stage.is_writer:
        model.card_facts = card_facts(recipe, read_metrics(stage.folder / "metrics.jsonl"))
        if model.plan.quantization is not None:
            model.card_facts["base held in"] = str(model.plan.quantization)
    dtype = recipe.export.adapter_dtype
    save_adapter(model, adapter, dtype=None if dtype == "auto" else getattr(torch, dtype))
    if not stage.is_writer:
        return
    tokenizer.save_pretrained(adapter)
    draw_loss(stage.folder / "metrics.jsonl", stage.folder / "loss.png", title=recipe.name)
    stage.say(f"adapter saved in {adapter}")


def _finish(
    recipe: Recipe,
    source: ModelSource,
    plan: Plan,
    folder: Path,
    processes: Processes,
    dtype: torch.dtype,
) -> RunSummary:
    """What one process does alone, once the others have given their memory back."""
    report = None
    if processes.rank == 0 and recipe.export.verify:
        report = _verify(recipe, source, folder, dtype)
    if processes.rank == 0 and recipe.export.merged:
        merge_adapter(source.path, folder / "adapter", folder / "merged", overwrite=True)
    records = read_metrics(folder / "metrics.jsonl") if processes.rank == 0 else []
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    return RunSummary(
        run=folder,
        adapter=folder / "adapter",
        first_eval_loss=losses[0] if losses else None,
        last_eval_loss=losses[-1] if losses else None,
        can_merge=not plan.has_experts and can_merge_into(folder / "merged", folder / "adapter"),
        verified_difference=None if report is None else report.max_abs_diff,
    )


def _verify(recipe: Recipe, source: ModelSource, folder: Path, dtype: torch.dtype) -> VerifyReport:
    report = verify_adapter(
        folder / "adapter",
        source.path,
        folder / PROBE,
        dtype=dtype,
        quantization=build_quantization_config(recipe.quantization),
    )
    if not report.passed:
        raise ArtifactError(
            f"{folder / 'adapter'}: in plain PEFT its logits differ from the trained model's by "
            f"{report.max_abs_diff:.3g}, more than {report.tolerance:.3g}, or it does nothing "
            f"(it moves the base's logits by {report.max_effect:.3g}); do not use it"
        )
    return report
