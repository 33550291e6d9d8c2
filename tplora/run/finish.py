"""What one process does alone at the end of a run: verify the adapter, merge it, sum up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.artifact.mergeable import can_merge_into
from tplora.artifact.push import push_folder
from tplora.artifact.verify import VerifyReport, verify_adapter, write_record
from tplora.errors import ArtifactError
from tplora.run.card import first_and_last, write_merged_card
from tplora.run.folder import PROBE
from tplora.run.merging import merge_into_base
from tplora.run.summary import RunSummary
from tplora.train.metrics import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from tplora.mesh import Processes
    from tplora.recipe.schema import ExportTable, Recipe
    from tplora.run.base import Base

__all__ = ["finish"]


def finish(
    recipe: Recipe, base: Base, folder: Path, processes: Processes, best_step: int | None
) -> RunSummary:
    """What one process does alone, once the others have given their memory back."""
    report, not_pushed = None, ""
    if processes.rank == 0 and recipe.export.verify:
        report = _verify(base, folder)
    if processes.rank == 0 and recipe.export.merged:
        note = merge_into_base(base, folder / "adapter", folder / "merged", overwrite=True)
        parts = {folder / "adapter": 1.0}
        write_merged_card(folder, parts, base.path, folder / "merged", note=note)
    if processes.rank == 0 and recipe.export.push_to_hub is not None:
        not_pushed = _push(folder / "adapter", recipe.export)
    records = read_metrics(folder / "metrics.jsonl") if processes.rank == 0 else []
    losses = first_and_last(records, "eval_loss", best_step) or (None, None)
    return RunSummary(
        run=folder,
        adapter=folder / "adapter",
        first_eval_loss=losses[0],
        last_eval_loss=losses[1],
        eval_accuracies=first_and_last(records, "eval_rewards/accuracies", best_step),
        best_step=best_step,
        can_merge=can_merge_into(folder / "merged", folder / "adapter"),
        verified_difference=None if report is None else report.max_abs_diff,
        not_pushed=not_pushed,
    )


def _push(adapter: Path, export: ExportTable) -> str:
    """Upload what is complete already; what went wrong, if anything did."""
    try:
        push_folder(adapter, str(export.push_to_hub), private=export.hub_private_repo)
    except ArtifactError as error:
        return str(error)
    return ""


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
    write_record(report, folder / "adapter", compared="adapter in plain PEFT")
    return report
