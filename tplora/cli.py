"""The command line: arguments to calls of public functions; prints what they return.

Imports stand inside the commands, so that ``tplora --help`` is instant.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    prepared: Annotated[bool, typer.Option("--prepared", hidden=True)] = False,
) -> None:
    """Train an adapter: on every GPU, or on the CPU.

    Starts the processes itself: parallel.tp_size of them for each copy of the model; "auto" is one
    for each GPU. Works inside torchrun, too.
    """
    from tplora.mesh import current_processes
    from tplora.plan.axes import fill_world
    from tplora.recipe.check import read_recipe
    from tplora.terminal.steps import finetune_from_here, prepare_rank, train

    if resume and overwrite:
        raise typer.BadParameter(
            "keeps the run that --overwrite would replace", param_hint="--resume"
        )
    asked = read_recipe(recipe, set_ or [])
    folder = output or Path("runs") / asked.name
    processes = current_processes()
    if not processes.is_launched:
        finetune_from_here(asked, folder, overrides=set_ or [], overwrite=overwrite, resume=resume)
        return
    axes, rank = fill_world(processes.world_size, asked.parallel), processes.rank
    if prepared or prepare_rank(
        asked, folder, rank=rank, axes=axes, overwrite=overwrite, resume=resume
    ):
        train(asked, folder, rank=rank, resume=resume)


@app.command()
def plan(recipe: RecipePath, set_: Overrides = None) -> None:
    """Show how a recipe's model and adapter will be cut.

    Needs no weights, no processes and no GPU.
    """
    from tplora.recipe.check import read_recipe
    from tplora.terminal.steps import planned_axes, show_plan

    asked = read_recipe(recipe, set_ or [])
    show_plan(asked, axes=planned_axes(asked))


@app.command()
def check(recipe: RecipePath, set_: Overrides = None) -> None:
    """Check what can be known before training: recipe, rows, plan."""
    from tplora.recipe.check import read_recipe
    from tplora.run.preflight import tokenize_recipe_rows
    from tplora.terminal.show import say
    from tplora.terminal.steps import planned_axes, show_plan

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
    merged: Annotated[Path, typer.Option(metavar="OUT", help="Folder of the merged model.")],
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
) -> None:
    """Merge a run's adapter into its base: a model that needs no PEFT.

    Goes on where a merge that was stopped has been.
    """
    from tplora.run.export import find_parts, merge_parts
    from tplora.terminal.show import byte_bar, say

    parts = find_parts(run, base=base, weight=weight, others=adapter or [], progress=say)
    with byte_bar() as on_bytes:
        report = merge_parts(
            parts, merged, dtype=dtype, overwrite=overwrite, progress=say, on_bytes=on_bytes
        )
    if report.unchanged:
        say(f"{len(report.unchanged)} of {len(report.changed)} tensors came out as the base's")
    say(f"merged model: {merged}", style="green")
    if parts.base.quantization is not None:
        say("it holds the base as it was before it was quantised, which was not trained on")


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
