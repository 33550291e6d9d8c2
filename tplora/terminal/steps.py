"""What a command does around a run: check and show the plan, clear the folder, start the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.terminal.show import say, show, show_table

if TYPE_CHECKING:
    from pathlib import Path

    from tplora.plan.axes import Axes
    from tplora.recipe.schema import Recipe

__all__ = [
    "bench_from_here",
    "finetune_from_here",
    "planned_axes",
    "prepare_rank",
    "show_plan",
    "show_prediction",
    "start_ranks",
    "train",
]


def finetune_from_here(
    recipe: Recipe, folder: Path, *, overrides: list[str], overwrite: bool, resume: bool
) -> None:
    """The parent's part: everything that can go wrong early, then the ranks."""
    from tplora.launch.launcher import count_gpus, default_num_processes
    from tplora.plan.axes import fill_world
    from tplora.run.folder import LOGS

    num_processes = default_num_processes(recipe.parallel, num_gpus=count_gpus())
    axes = fill_world(num_processes, recipe.parallel)
    if not prepare_rank(recipe, folder, rank=0, axes=axes, overwrite=overwrite, resume=resume):
        return
    if num_processes == 1:
        train(recipe, folder, rank=0, resume=resume)
        return
    argv = ["finetune", str(recipe.path), "--output", str(folder), "--prepared"]
    argv += ["--resume"] if resume else []
    for override in overrides:
        argv += ["--set", override]
    start_ranks(argv, num_processes, log_folder=folder / LOGS)


def bench_from_here(
    recipe: Recipe, *, overrides: list[str], steps: int, warmup: int, file: Path | None
) -> None:
    """Time a recipe's steps: here if this is a rank, or one process is all there is."""
    from tplora.launch.launcher import count_gpus, default_num_processes
    from tplora.mesh import current_processes
    from tplora.plan.axes import fill_world
    from tplora.run.preflight import plan_recipe

    if not current_processes().is_launched:
        num_processes = default_num_processes(recipe.parallel, num_gpus=count_gpus())
        axes = fill_world(num_processes, recipe.parallel)
        plan_recipe(recipe, tp_size=axes.tp_size, progress=say)
        if num_processes > 1:
            argv = ["bench", str(recipe.path), "--steps", str(steps), "--warmup", str(warmup)]
            argv += [] if file is None else ["--json", str(file)]
            for override in overrides:
                argv += ["--set", override]
            start_ranks(argv, num_processes, log_folder=None)
            return
    from tplora.bench.run import run_bench

    result = run_bench(recipe, num_warmup=warmup, num_timed=steps, file=file)
    if result is not None:
        show_table(result.rows())


def prepare_rank(
    recipe: Recipe, folder: Path, *, rank: int, axes: Axes, overwrite: bool, resume: bool
) -> bool:
    """What comes before training: the first rank prepares; each sees whether anything is to do.

    Returns:
        False if the run that was to be resumed is complete.
    """
    if resume:
        return _prepare_resume(recipe, folder, axes=axes, is_shown=rank == 0)
    if rank == 0:
        _prepare(recipe, folder, axes=axes, overwrite=overwrite)
    return True


def _prepare(recipe: Recipe, folder: Path, *, axes: Axes, overwrite: bool) -> None:
    """Check folder and plan, show the plan, then clear the folder: nothing is lost to a mistake."""
    from tplora.run.folder import check_run_folder, clear_run_folder

    check_run_folder(folder, overwrite=overwrite)
    show_plan(recipe, axes=axes)
    clear_run_folder(folder)


def _prepare_resume(recipe: Recipe, folder: Path, *, axes: Axes, is_shown: bool) -> bool:
    """Check that the run can go on and show its plan; touches nothing."""
    from tplora.run.resume import find_resume

    tell = say if is_shown else _say_nothing
    if find_resume(recipe, folder, say=tell) is None:
        tell(f"{folder}: this run is complete; its adapter is {folder / 'adapter'}")
        return False
    if is_shown:
        show_plan(recipe, axes=axes)
    return True


def _say_nothing(_message: str) -> None:
    """Of ranks that others speak for."""


def train(recipe: Recipe, folder: Path, *, rank: int, resume: bool) -> None:
    """Run the recipe in this process, one of the ranks; the first one shows what came of it."""
    from tplora.run.finetune import run_finetune

    summary = run_finetune(recipe, folder, resume=resume)
    if rank == 0:
        show_table(summary.rows())
        say("\n" + "\n".join(summary.next_commands()))


def start_ranks(argv: list[str], num_processes: int, *, log_folder: Path | None) -> None:
    """Run ``tplora argv`` in so many processes and wait for them."""
    from tplora.errors import LaunchError
    from tplora.launch.launcher import launch
    from tplora.mesh import child_environment

    say(f"starting {num_processes} processes ...", style="dim")
    try:
        launch(
            ["-m", "tplora", *argv],
            num_processes=num_processes,
            log_folder=log_folder,
            env=child_environment(num_processes),
        )
    except LaunchError as error:
        if log_folder is not None:
            with (log_folder.parent / "log.txt").open("a", encoding="utf-8") as log:
                log.write(f"{error}\n")
        raise
    except KeyboardInterrupt:
        say("\ninterrupted: every process has ended", is_error=True)
        raise


def show_plan(recipe: Recipe, *, axes: Axes) -> None:
    """Make a recipe's plan and show it."""
    from tplora.plan.report import render_plan
    from tplora.run.preflight import plan_recipe

    plan = plan_recipe(recipe, tp_size=axes.tp_size, progress=say)
    show(render_plan(plan, axes))


def show_prediction(recipe: Recipe, *, axes: Axes, gpu_memory: str | None) -> None:
    """Make a recipe's plan and show it, with what a step will take and say.

    A plan that cannot be run through is shown all the same, with the reason.
    """
    from tplora.errors import PlanError
    from tplora.plan.report import render_plan
    from tplora.plan.size import parse_size
    from tplora.plan.step_report import step_facts
    from tplora.run.fit import find_fit
    from tplora.run.predict import num_micro_batches, predict_step
    from tplora.run.preflight import plan_recipe

    memory = None if gpu_memory is None else parse_size(gpu_memory, where="--gpu-memory")
    plan = plan_recipe(recipe, tp_size=axes.tp_size, progress=say)
    try:
        cost = predict_step(recipe, plan)
        facts = step_facts(plan, axes, cost, num_micro_batches=num_micro_batches(recipe))
        if memory is not None:
            facts += find_fit(recipe, axes, memory, progress=_say_aside).facts()
    except PlanError as error:
        if memory is not None:
            raise
        facts = [("memory per rank", f"not predicted: {error}")]
    show(render_plan(plan, axes, facts))


def _say_aside(message: str) -> None:
    say(message, style="dim", is_error=True)


def planned_axes(recipe: Recipe) -> Axes:
    """Of a plan that is only looked at: as asked, whatever this machine has."""
    from tplora.launch.launcher import count_gpus, default_num_processes
    from tplora.plan.axes import fill_world

    num_gpus = count_gpus() if recipe.parallel.tp_size == "auto" else 0
    return fill_world(default_num_processes(recipe.parallel, num_gpus=num_gpus), recipe.parallel)
