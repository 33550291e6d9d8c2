"""Commands of a run: check, use, merge and publish what it has trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tplora.commands.arguments import RunPath

__all__ = ["export", "generate", "push", "verify"]


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
