"""The command line: arguments to calls of public functions; prints what they return.

Imports stand inside the commands, so that ``tplora --help`` is instant.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tplora.terminal.convert import convert

if TYPE_CHECKING:
    from types import TracebackType


__all__ = ["app", "main"]

app = typer.Typer(
    name="tplora",
    help="Fine-tune language models too large for one GPU: LoRA under tensor parallelism.",
    epilog="Start with: tplora recipes list",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich's takes longer to import than tplora may take at all
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(
    help="List the recipes that come with tplora, or copy one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(recipes_app, name="recipes")

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the recipe, such as train.max_steps=5. Can be repeated.",
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, as in runs/NAME.")]


def main() -> None:
    """Run the command line.

    Errors leave it as exceptions: the interpreter shows them through ``show_error`` and exits with
    status 1, and in a rank that ``launch`` started, ``tplora.launch.rank`` gets them instead.
    """
    sys.excepthook = _show_error
    warnings.simplefilter("ignore", FutureWarning)  # upstream's notices to each other, not to users
    if not sys.stderr.isatty():  # a progress bar in a file or a pipe is one very long line
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    typer.main.get_command(app)(prog_name="tplora")


def _show_error(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    from tplora.terminal.show import show_error

    show_error(kind, error, traceback)


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, an adapter's, or a hub id.")
    ],
    merged: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Folder of the merged model.")
    ] = None,
    for_: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="CONSUMER",
            help="Check the adapter, not merged, by the rules of peft, transformers, vllm, sglang, "
            "tgi or llama.cpp, and write what it takes to --out.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Folder of the adapter that --for writes.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="The base's folder or hub id.", show_default="what it was trained on"),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=WEIGHT", help="A further adapter, to merge as well. Can be repeated."
        ),
    ] = None,
    weight: Annotated[float, typer.Option(help="Of RUN's own adapter.")] = 1.0,
    dtype: Annotated[
        str | None, typer.Option(help="Of the result, as float16.", show_default="the base's")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what OUT holds.")] = False,
    into: Annotated[
        Literal["auto", "dequantized", "original"],
        typer.Option(
            help="Of a base that was quantised: its weights as the model saw them, or as they "
            "were before.",
            show_default="dequantized",
        ),
    ] = "auto",
    evaluate: Annotated[
        bool, typer.Option(help="Of a base that was quantised: evaluate the merged model.")
    ] = True,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Upload OUT to this repository of the hub.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see the repository.")
    ] = False,
) -> None:
    """Merge a run's adapter into its base, or write the adapter for what is to serve it.

    A merge goes on where one that was stopped has been.
    """
    if (merged is None) == (for_ is None) or (for_ is None) != (out is None):
        raise typer.BadParameter(
            "name one: where to merge to, or whom to write the adapter for and where to",
            param_hint="--merged OUT | --for CONSUMER --out OUT",
        )
    if merged is None and (adapter or weight != 1.0 or into != "auto" or push_to_hub or public):
        raise typer.BadParameter(
            "belongs to --merged",
            param_hint="--adapter | --weight | --into | --push-to-hub | --public",
        )
    from tplora.terminal.export import export_and_say, merge_and_say

    if for_ is not None and out is not None:
        export_and_say(run, for_, out, base=base, dtype=dtype, overwrite=overwrite)
    elif merged is not None:
        merge_and_say(
            run,
            merged,
            base=base,
            dtype=dtype,
            overwrite=overwrite,
            others=adapter or [],
            weight=weight,
            into=into,
            evaluate=evaluate,
            push_to_hub=push_to_hub,
            private=not public,
        )


@app.command()
def verify(
    run: RunPath,
    merged: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Check this merged model, not the adapter."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Fraction of the largest logit.", show_default="by dtype"),
    ] = None,
) -> None:
    """Reload a run's adapter in plain PEFT, or its merged model, and compare logits.

    Leaves a record, verify.json, beside what was checked.
    """
    from tplora.errors import ArtifactError
    from tplora.run.verify import check_run
    from tplora.terminal.show import say, show_table

    found, record = check_run(run, merged=merged, tolerance=tolerance, progress=say)
    where = "of a logit, in plain PEFT" if merged is None else "of a logit, merged"
    show_table(
        [
            ("largest difference", f"{found.max_abs_diff:.3g} ({where})"),
            ("tolerance", f"{found.tolerance:.3g}"),
            ("effect of the adapter", f"{found.max_effect:.3g} (the same, without it)"),
            ("same next token", f"{found.top1_agreement:.1%} of {found.num_positions} places"),
            ("KL divergence", f"{found.kl_divergence:.2g} nats"),
            ("record", str(record)),
        ]
    )
    if not found.passed:
        what = "adapter" if merged is None else "model"
        raise ArtifactError(f"{merged or run}: not verified, see above; do not use this {what}")
    how = "plain PEFT" if merged is None else "the merged model"
    say(f"verified: {how} says what the trained model said", style="green")


@app.command()
def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Argument(help="What to answer.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 256,
    tp_size: Annotated[int, typer.Option(min=1, help="Processes to cut the model over.")] = 1,
) -> None:
    """Answer a prompt with a run's base and adapter."""
    from tplora.mesh import current_processes
    from tplora.run.folder import find_adapter
    from tplora.terminal.steps import start_ranks

    find_adapter(run)
    if tp_size > 1 and not current_processes().is_launched:
        argv = ["generate", str(run), "--max-new-tokens", str(max_new_tokens)]
        start_ranks([*argv, "--tp-size", str(tp_size), "--", prompt], tp_size, log_folder=None)
        return
    from tplora.run.generate import run_generate

    run_generate(run, prompt, max_new_tokens=max_new_tokens, tp_size=tp_size)


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A run's, an adapter's or a merged model's.")
    ],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="On the hub, as OWNER/NAME.")],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody see the repository.")
    ] = False,
) -> None:
    """Upload an adapter or a merged model to the hub: private, in one commit."""
    from tplora.artifact.push import push_folder
    from tplora.run.folder import find_adapter
    from tplora.terminal.show import say

    place = folder if (folder / "config.json").is_file() else find_adapter(folder)
    say(f"pushed: {push_folder(place, repo, private=not public, progress=say)}", style="green")


@app.command()
def inspect(
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="An adapter, or a run.")],
    other: Annotated[
        Path | None, typer.Argument(metavar="OTHER", help="Another one, to compare it with.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The base's folder, if it is not where the adapter says.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what an adapter holds and what looks wrong in it, or how two differ."""
    from tplora.artifact.comparison import compare_adapters
    from tplora.artifact.inspection import inspect_adapter
    from tplora.run.folder import find_adapter
    from tplora.terminal.adapters import as_json, comparison_tables, inspection_tables
    from tplora.terminal.show import show

    folder = find_adapter(adapter)
    if other is None:
        found = inspect_adapter(folder, base=base)
        tables = inspection_tables(found, by_layer=layers)
        text = as_json(found) if json else None
    else:
        compared = compare_adapters(folder, find_adapter(other))
        tables = comparison_tables(compared, by_layer=layers)
        text = as_json(compared) if json else None
    if text is None:
        show(tables)
    else:
        print(text)


app.command()(convert)


@recipes_app.command("list")
def list_shipped() -> None:
    """List the recipes."""
    from tplora.terminal.shipped import list_recipes, shelf
    from tplora.terminal.show import say, show_table

    found = list_recipes(shelf())
    show_table([(recipe.name, recipe.summary) for recipe in found])
    if found:
        say("\nto change one: tplora recipes copy NAME FOLDER")
    else:
        say(f"no recipes in {shelf()}: they come with a clone of tplora's repository")


@recipes_app.command()
def copy(
    name: Annotated[str, typer.Argument(help="As `tplora recipes list` shows it.")],
    to: Annotated[Path, typer.Argument(help="Folder to copy it to.")] = Path(),
) -> None:
    """Copy a recipe and its rows, to change them."""
    from tplora.terminal.shipped import copy_recipe, shelf
    from tplora.terminal.show import say

    for path in copy_recipe(name, folder=shelf(), to=to):
        say(str(path))


@app.command()
def models(
    name: Annotated[str, typer.Argument(help="Only names with this in them.")] = "",
) -> None:
    """List the architectures that are exact when cut."""
    from tplora.terminal.models import models_table
    from tplora.terminal.show import show

    show(models_table(name))


@app.command()
def report() -> None:
    """Show versions, devices, cores and memory, for a bug report."""
    from tplora.terminal.report import environment_report
    from tplora.terminal.show import show_table

    show_table(environment_report())
