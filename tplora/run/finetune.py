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
from trl import SFTConfig

from tplora.adapter.attach import attach_adapter
from tplora.adapter.load import load_factors
from tplora.adapter.loftq import replace_lora_weights_loftq
from tplora.adapter.save import save_adapter
from tplora.artifact.mergeable import can_merge_into
from tplora.artifact.probe import choose_probe_rows, record_probe
from tplora.artifact.verify import VerifyReport, verify_adapter
from tplora.base.load import check_shards, load_base
from tplora.base.resize import resize_tokens
from tplora.base.source import ModelSource, resolve_model
from tplora.errors import ArtifactError, TploraError
from tplora.files import write_text_aside
from tplora.mesh import Processes, current_processes, join_process_group, leave_process_group
from tplora.plan.axes import fill_world
from tplora.plan.lora import started_from
from tplora.plan.quantization import build_quantization_config
from tplora.plan.report import plan_text
from tplora.run.base import Base
from tplora.run.card import card_facts
from tplora.run.folder import PROBE, drop_the_end
from tplora.run.merging import merge_into_base
from tplora.run.preflight import plan_recipe, tokenize_recipe_rows
from tplora.run.summary import RunSummary
from tplora.run.vocabulary import AdapterSetup, load_tokenizer, set_up_adapter
from tplora.train.metrics import MetricsCallback, read_metrics
from tplora.train.parallelism import parallelism_config
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
    base = Base(
        path=source.path,
        revision=None if source.is_local else recipe.model.revision,
        dtype=dtype,
        quantization=build_quantization_config(recipe.quantization),
    )
    return _finish(recipe, base, plan, folder, processes)


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
    model = _load(recipe, source, plan, device, set_up_adapter(recipe, source))
    args = _training_arguments(recipe, model, stage, device)
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


def _load(
    recipe: Recipe, source: ModelSource, plan: Plan, device: torch.device, setup: AdapterSetup
) -> TploraModel:
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


def _training_arguments(
    recipe: Recipe, model: TploraModel, stage: _Stage, device: torch.device
) -> SFTConfig:
    # What was evaluated before the first step is not evaluated before a later one.
    settings = (
        {"report_to": "none"} | recipe.train | ({"eval_on_start": False} if stage.resume else {})
    )
    return SFTConfig(
        **settings,
        output_dir=str(stage.folder),
        parallelism_config=parallelism_config(model),
        use_cpu=device.type == "cpu",
        disable_tqdm=True,
        log_level="error",
        dataset_kwargs={"skip_prepare_dataset": True},
        include_num_input_tokens_seen="non_padding",
        logging_nan_inf_filter=False,
    )


def _save(
    recipe: Recipe, model: TploraModel, tokenizer: PreTrainedTokenizerBase, stage: _Stage
) -> None:
    adapter = stage.folder / "adapter"
    if stage.is_writer:
        model.card_facts = card_facts(recipe, read_metrics(stage.folder / "metrics.jsonl"))
    dtype = recipe.export.adapter_dtype
    save_adapter(model, adapter, dtype=None if dtype == "auto" else getattr(torch, dtype))
    if not stage.is_writer:
        return
    tokenizer.save_pretrained(adapter)
    draw_loss(stage.folder / "metrics.jsonl", stage.folder / "loss.png", title=recipe.name)
    stage.say(f"adapter saved in {adapter}")


def _finish(
    recipe: Recipe, base: Base, plan: Plan, folder: Path, processes: Processes
) -> RunSummary:
    """What one process does alone, once the others have given their memory back."""
    is_asked = processes.rank == 0 and recipe.export.verify
    report = _verify(base, folder) if is_asked else None
    if processes.rank == 0 and recipe.export.merged:
        merge_into_base(base, folder / "adapter", folder / "merged", overwrite=True)
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


def _verify(base: Base, folder: Path) -> VerifyReport:
    report = verify_adapter(
        folder / "adapter",
        base.path,
        folder / PROBE,
        dtype=base.dtype,
        quantization=base.quantization,
    )
    if not report.passed:
        raise ArtifactError(
            f"{folder / 'adapter'}: in plain PEFT its logits differ from the trained model's by "
            f"{report.max_abs_diff:.3g}, more than {report.tolerance:.3g}, or it does nothing "
            f"(it moves the base's logits by {report.max_effect:.3g}); do not use it"
        )
    return report
