"""One rank's part of a benchmark: the recipe's own trainer, for a few steps, and nothing kept."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from transformers import AutoConfig, PrinterCallback

from tplora.base.source import resolve_model
from tplora.bench.devices import peak_flops
from tplora.bench.flops import step_flops
from tplora.bench.result import BenchResult
from tplora.bench.timing import StepTimes
from tplora.files import write_text_aside
from tplora.mesh import current_processes, join_process_group, leave_process_group
from tplora.plan.axes import fill_world
from tplora.run.loading import load_model
from tplora.run.predict import planned_batch
from tplora.run.preflight import plan_recipe, tokenize_recipe_rows
from tplora.run.training import training_arguments
from tplora.run.vocabulary import load_tokenizer
from tplora.train.kinds import TRAINERS, prepare_rows
from tplora.train.metrics import peak_memory

if TYPE_CHECKING:
    from tplora.base.source import ModelSource
    from tplora.plan.axes import Axes
    from tplora.plan.build import Plan
    from tplora.recipe.schema import Recipe

__all__ = ["run_bench"]

_NUM_PROFILED = 2
_LIBRARIES = ("tplora", "torch", "transformers", "peft", "trl")


def run_bench(
    recipe: Recipe, *, num_warmup: int, num_timed: int, file: Path | None
) -> BenchResult | None:
    """Time the recipe's training steps. Collective: every rank of the world calls it.

    Args:
        recipe: A checked recipe.
        num_warmup: Steps before the clock runs.
        num_timed: Steps that are timed; two more are profiled.
        file: Where the first rank writes the result as JSON.

    Returns:
        What was found, on the first rank.

    Raises:
        TploraError: What a run of the recipe would stop with.
    """
    processes = current_processes()
    device = join_process_group(processes)
    times = StepTimes(num_warmup=num_warmup, num_timed=num_timed, num_profiled=_NUM_PROFILED)
    try:
        source = resolve_model(recipe.model, recipe_folder=recipe.path.parent)
        axes = fill_world(processes.world_size, recipe.parallel)
        plan = plan_recipe(recipe, tp_size=axes.tp_size)
        with tempfile.TemporaryDirectory(prefix="tplora-bench-") as folder:
            short = _only_steps(recipe, times.num_steps)
            row_tokens = _train(short, source, plan, device, times, Path(folder))
        peak = _largest(peak_memory())
        result = _result(recipe, source, plan, axes, device, times, peak, row_tokens)
    finally:
        leave_process_group()
    if processes.rank != 0:
        return None
    if file is not None:
        write_text_aside(file, json.dumps(result.record(), indent=2) + "\n", overwrite=True)
    return result


def _only_steps(recipe: Recipe, num_steps: int) -> Recipe:
    """The recipe's steps without what happens beside them."""
    quiet = {
        "max_steps": num_steps,
        "eval_strategy": "no",
        "eval_on_start": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "load_best_model_at_end": False,
    }
    return dataclasses.replace(recipe, train=recipe.train | quiet)


def _train(
    recipe: Recipe,
    source: ModelSource,
    plan: Plan,
    device: torch.device,
    times: StepTimes,
    folder: Path,
) -> float:
    """Train, and return how many tokens a row has on average, in a pack or not."""
    rows = next(tokenize_recipe_rows(recipe))
    model = load_model(recipe, source, plan, device)
    args = training_arguments(recipe, model, folder, device, resume=False)
    trainer = TRAINERS[recipe.method](
        model=model,
        args=args,
        train_dataset=prepare_rows(recipe.method, rows.dataset, args),
        processing_class=load_tokenizer(recipe, source),
        check_every_steps=recipe.parallel.check_every_steps,
        callbacks=[times],
        **{key: value for key, value in recipe.lora.items() if key.startswith("loraplus_")},
    )
    trainer.pop_callback(PrinterCallback)
    trainer.train()
    return rows.num_tokens / rows.num_rows


def _result(
    recipe: Recipe,
    source: ModelSource,
    plan: Plan,
    axes: Axes,
    device: torch.device,
    times: StepTimes,
    peak: int,
    row_tokens: float,
) -> BenchResult:
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else platform.processor() or "CPU"
    tokens = [count / axes.tp_size for count in times.tokens]
    config = AutoConfig.from_pretrained(
        source.path, trust_remote_code=recipe.model.trust_remote_code
    )
    dtype = "bfloat16" if recipe.train.get("bf16") else plan.base_dtype  # what is multiplied in
    most = peak_flops(name, dtype) if is_gpu else None
    mean, row = statistics.mean(tokens), planned_batch(recipe, 1)
    return BenchResult(
        recipe=recipe.name,
        axes=str(axes),
        device=name,
        dtype=dtype,
        step_seconds=tuple(times.seconds),
        step_tokens=tuple(tokens),
        collective_share=(
            times.in_collectives / times.profiled_seconds if axes.world_size > 1 else None
        ),
        peak_bytes=peak,
        peak_kind="allocated" if is_gpu else "resident",
        flops_per_step=step_flops(
            plan,
            config,
            num_tokens=mean,
            length=row_tokens / row.rows,
            num_passes=row.passes_before + row.reference_passes,
        ),
        device_flops=None if most is None else most * axes.world_size,
        versions={library: metadata.version(library) for library in _LIBRARIES},
    )


def _largest(num_bytes: int) -> int:
    """The largest number of all ranks. Collective."""
    if not dist.is_initialized():
        return num_bytes
    found = [0] * dist.get_world_size()
    dist.all_gather_object(found, num_bytes)
    return max(found)
