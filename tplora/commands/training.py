"""Commands of a recipe: train it, or say before what it will be and take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tplora.commands.arguments import Overrides, RecipePath

__all__ = ["bench", "check", "finetune", "plan"]


def finetune(
    recipe: RecipePath,
    output: Annotated[
        Path | None,
        typer.Option(help="The run's folder.", show_default="runs/<name of the recipe>"),
    ] = None,
    set_: Overrides = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run that the folder holds.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the folder's last checkpoint, over any [parallel] sizes."
        ),
    ] = False,
    resume_or_start: Annotated[
        bool,
        typer.Option(
            "--resume-or-start",
            help="Go on from it if there is one, else start: a command to give a scheduler.",
        ),
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="How often to go on from the last checkpoint after a process failed."
        ),
    ] = 0,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines that train together.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This machine's number, from 0.")] = 0,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Of node 0, where the nodes meet.")
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Processes of each machine.", show_default="from [parallel]"),
    ] = None,
    prepared: Annotated[bool, typer.Option("--prepared", hidden=True)] = False,
) -> None:
    """Train an adapter: on every GPU, or on the CPU.

    Starts the processes itself: parallel.tp_size of them for each copy of the model; "auto" is one
    for each GPU. Works inside torchrun, too.
    """
    from tplora.launch.nodes import Nodes
    from tplora.mesh import current_processes
    from tplora.recipe.check import read_recipe
    from tplora.run.start import Start
    from tplora.terminal.steps import finetune_from_here, finetune_in_rank

    start = Start(resume=resume, or_begin=resume_or_start, overwrite=overwrite)
    if start.goes_on and overwrite:
        raise typer.BadParameter(
            "keeps the run that --overwrite would replace",
            param_hint="--resume" if resume else "--resume-or-start",
        )
    asked = read_recipe(recipe, set_ or [])
    folder = output or Path("runs") / asked.name
    nodes = Nodes(
        num_nodes=nnodes,
        node_rank=node_rank,
        endpoint=rdzv_endpoint,
        processes_per_node=nproc_per_node,
    )
    if not current_processes().is_launched:
        finetune_from_here(
            asked,
            folder,
            overrides=set_ or [],
            start=start,
            nodes=nodes,
            max_restarts=max_restarts,
        )
        return
    if nodes != Nodes() or max_restarts:
        raise typer.BadParameter(
            "torchrun has started this process: give it torchrun, under the same name",
            param_hint="--nnodes, --node-rank, --rdzv-endpoint, --nproc-per-node, --max-restarts",
        )
    finetune_in_rank(asked, folder, start=start, is_prepared=prepared)


def plan(
    recipe: RecipePath,
    set_: Overrides = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Say what fits a GPU of that size, such as 80GiB: the fewest processes, and the "
            "most rows of a micro-batch.",
        ),
    ] = None,
) -> None:
    """Show how a recipe's model and adapter will be cut, and what a step takes.

    Memory and bytes are those of a step that is run through without weights. Needs no processes
    and no GPU.
    """
    from tplora.recipe.check import read_recipe
    from tplora.terminal.planned import planned_axes, show_prediction

    asked = read_recipe(recipe, set_ or [])
    show_prediction(asked, axes=planned_axes(asked), gpu_memory=gpu_memory)


def bench(
    recipe: RecipePath,
    set_: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time.")] = 10,
    warmup: Annotated[int, typer.Option(min=0, help="Steps before the clock runs.")] = 3,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there, too.")
    ] = None,
) -> None:
    """Time a recipe's own training steps; nothing of it is kept.

    Starts as many processes as a run of the recipe would.
    """
    from tplora.recipe.check import read_recipe
    from tplora.terminal.steps import bench_from_here

    bench_from_here(
        read_recipe(recipe, set_ or []),
        overrides=set_ or [],
        steps=steps,
        warmup=warmup,
        file=json_,
    )


def check(recipe: RecipePath, set_: Overrides = None) -> None:
    """Check what can be known before training: recipe, rows, plan."""
    from tplora.recipe.check import read_recipe
    from tplora.run.preflight import tokenize_recipe_rows
    from tplora.terminal.planned import planned_axes, show_plan
    from tplora.terminal.show import say

    asked = read_recipe(recipe, set_ or [])
    show_plan(asked, axes=planned_axes(asked))
    for rows in tokenize_recipe_rows(asked):
        say(rows.summary())
    say(f"ready: tplora finetune {recipe}", style="green")
