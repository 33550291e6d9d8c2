"""What a command does around a run: show the plan, clear the folder, start the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.terminal.planned import show_plan
from tplora.terminal.show import say, show_table

if TYPE_CHECKING:
    from pathlib import Path

    from tplora.launch.nodes import Nodes
    from tplora.plan.axes import Axes
    from tplora.recipe.schema import Recipe
    from tplora.run.start import Start

__all__ = [
    "bench_from_here",
    "finetune_from_here",
    "finetune_in_rank",
    "prepare_rank",
    "start_ranks",
    "train",
]


def finetune_from_here(
    recipe: Recipe,
    folder: Path,
    *,
    overrides: list[str],
    start: Start,
    nodes: Nodes,
    max_restarts: int,
) -> None:
    """The parent's part: everything that can go wrong early, then the ranks."""
    from tplora.launch.launcher import count_gpus
    from tplora.launch.nodes import processes_of_node
    from tplora.run.folder import LOGS

    nodes.check()
    _check_restarts(recipe, max_restarts)
    num_processes, axes = processes_of_node(recipe.parallel, nodes, num_gpus=count_gpus())
    if not prepare_rank(recipe, folder, rank=nodes.node_rank, axes=axes, start=start):
        return
    if axes.world_size == 1 and not max_restarts:
        train(recipe, folder, rank=0, start=start)
        return
    argv = ["finetune", str(recipe.path), "--output", str(folder), "--prepared", *start.options()]
    for override in overrides:
        argv += ["--set", override]
    start_ranks(
        argv,
        num_processes,
        log_folder=folder / LOGS,
        nodes=_agreeing(nodes, recipe),
        max_restarts=max_restarts,
    )


def finetune_in_rank(recipe: Recipe, folder: Path, *, start: Start, is_prepared: bool) -> None:
    """One rank's part, inside torchrun or started by the parent."""
    from dataclasses import replace

    from tplora.mesh import (
        are_restarts_possible,
        current_processes,
        join_process_group,
        largest_of_ranks,
        num_restarts,
    )
    from tplora.plan.axes import fill_world

    processes = current_processes()
    axes = fill_world(processes.world_size, recipe.parallel)
    axes.check_node(processes.local_world_size)
    if not is_prepared:
        if are_restarts_possible():  # by torchrun, which gives every rank the same command again
            join_process_group(processes)
            is_first = largest_of_ranks(num_restarts()) == 0
            start = start if is_first else replace(start, or_begin=True, overwrite=False)
        if not prepare_rank(recipe, folder, rank=processes.rank, axes=axes, start=start):
            return
    train(recipe, folder, rank=processes.rank, start=start)


def _check_restarts(recipe: Recipe, max_restarts: int) -> None:
    from tplora.errors import LaunchError

    if max_restarts and recipe.train.get("save_strategy", "no") == "no":
        raise LaunchError(
            f"--max-restarts {max_restarts}: a restart goes on from a checkpoint, and this recipe "
            'saves none; set train.save_strategy = "steps" and train.save_steps'
        )


def _agreeing(nodes: Nodes, recipe: Recipe) -> Nodes:
    """Every node's recipe has to be the same one; its files may lie elsewhere."""
    from dataclasses import replace
    from zlib import crc32

    tables = recipe.tables()
    model = {k: v for k, v in tables["model"].items() if k != "pretrained_model_name_or_path"}
    told = crc32(repr([model, tables["parallel"], tables["lora"], tables["train"]]).encode())
    return replace(nodes, agreed=f" and a recipe whose sum is {told:08x}")


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


def prepare_rank(recipe: Recipe, folder: Path, *, rank: int, axes: Axes, start: Start) -> bool:
    """What comes before training: the first rank prepares; each sees whether anything is to do.

    Returns:
        False if the run that was to be resumed is complete.
    """
    if start.goes_on:
        return _prepare_resume(recipe, folder, axes=axes, is_first=rank == 0, start=start)
    if rank == 0:
        _prepare(recipe, folder, axes=axes, overwrite=start.overwrite)
    return True


def _prepare(recipe: Recipe, folder: Path, *, axes: Axes, overwrite: bool) -> None:
    """Check folder and plan, show the plan, then clear the folder: nothing is lost to a mistake."""
    from tplora.run.folder import check_run_folder, clear_run_folder
    from tplora.run.preflight import check_upload

    check_run_folder(folder, overwrite=overwrite)
    check_upload(recipe)
    show_plan(recipe, axes=axes)
    clear_run_folder(folder)


def _prepare_resume(
    recipe: Recipe, folder: Path, *, axes: Axes, is_first: bool, start: Start
) -> bool:
    """Check that the run can go on and show its plan; touches nothing unless it begins anew."""
    from tplora.run.preflight import check_upload
    from tplora.run.resume import NothingToResumeError, find_resume

    tell = say if is_first else _say_nothing
    try:
        checkpoint = find_resume(recipe, folder, say=tell)
    except NothingToResumeError:
        if not start.or_begin:
            raise
        if is_first:
            _prepare(recipe, folder, axes=axes, overwrite=(folder / "recipe.toml").is_file())
        return True
    if checkpoint is None:
        tell(f"{folder}: this run is complete; its adapter is {folder / 'adapter'}")
        return False
    if is_first:
        check_upload(recipe)
        show_plan(recipe, axes=axes)
    return True


def _say_nothing(_message: str) -> None:
    """Of ranks that others speak for."""


def train(recipe: Recipe, folder: Path, *, rank: int, start: Start) -> None:
    """Run the recipe in this process, one of the ranks; the first one shows what came of it.

    Raises:
        HubError: Of a run that is complete and was not uploaded, though it was asked for.
        SystemExit: With 75, if the run was asked to end.
    """
    from tplora.errors import HubError, PreemptedError
    from tplora.mesh import PREEMPTED
    from tplora.run.finetune import run_finetune

    try:
        summary = run_finetune(recipe, folder, start=start)
    except PreemptedError as error:
        if rank == 0:
            say(str(error), is_error=True)
        raise SystemExit(PREEMPTED) from None
    if rank == 0:
        show_table(summary.rows())
        say("\n" + "\n".join(summary.next_commands()))
        if summary.not_pushed:
            raise HubError(f"the run is complete, and was not uploaded: {summary.not_pushed}")


def start_ranks(
    argv: list[str],
    num_processes: int,
    *,
    log_folder: Path | None,
    nodes: Nodes | None = None,
    max_restarts: int = 0,
) -> None:
    """Run ``tplora argv`` in so many processes of this machine and wait for them."""
    from tplora.errors import LaunchError
    from tplora.launch.launcher import launch
    from tplora.launch.nodes import Nodes
    from tplora.mesh import child_environment

    nodes = nodes or Nodes()
    where = f" on node {nodes.node_rank} of {nodes.num_nodes}" if nodes.num_nodes > 1 else ""
    say(f"starting {num_processes} processes{where} ...", style="dim")
    log = _Log(log_folder)
    try:
        launch(
            ["-m", "tplora", *argv],
            num_processes=num_processes,
            log_folder=log_folder,
            env=child_environment(num_processes, is_on_loopback=nodes.is_on_loopback),
            nodes=nodes,
            max_restarts=max_restarts,
            say=log.say,
        )
    except LaunchError as error:
        log.write(str(error))
        raise
    except KeyboardInterrupt:
        say("\ninterrupted: every process has ended", is_error=True)
        raise


class _Log:
    """The run's log, for what the parent of the ranks has to add to it."""

    def __init__(self, log_folder: Path | None) -> None:
        self._path = log_folder and log_folder.parent / "log.txt"

    def say(self, line: str) -> None:
        say(line)
        self.write(line)

    def write(self, line: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as log:
                log.write(f"{line}\n")
