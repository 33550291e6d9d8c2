"""What a run tells the model cards of its adapter and of its merged model."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import ModelCard

from tplora.adapter.card import is_hub_id, merged_card_text, public_name
from tplora.files import write_text_aside
from tplora.recipe.methods import DEFAULT_METHOD
from tplora.recipe.parse import load_recipe
from tplora.recipe.toml import dump_toml
from tplora.saved.config import read_saved_config
from tplora.train.checkpoint_files import find_best_step
from tplora.train.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tplora.recipe.schema import Recipe

__all__ = ["card_details", "card_facts", "first_and_last", "license_of", "write_merged_card"]

_PACKAGES = ("tplora", "torch", "transformers", "peft", "trl")
_PATH = re.compile(r"(?:(?<=[\s\"'`(=\[])|^)(?:~|\.{1,2})?/[^\s\"'`|)\]]+")


def card_facts(
    recipe: Recipe, records: list[dict[str, float]], best_step: int | None = None
) -> dict[str, str]:
    """What the model card says of the training; ``best_step`` is saved, or the last one."""
    facts = {} if recipe.method == DEFAULT_METHOD else {"method": recipe.method}
    facts["rows"] = f"`{Path(recipe.data.train).name}`"
    digest = data_fingerprint(recipe.data.train)
    if digest is not None:
        facts["sha256 of the rows"] = f"`{digest}`"
    if records:
        facts["steps"] = str(best_step or records[-1]["step"])
    if best_step is not None and records:
        facts["chosen among"] = f"the checkpoints of {records[-1]['step']} steps"
    losses = first_and_last(records, "eval_loss", best_step)
    if losses:
        facts["evaluation loss"] = " -> ".join(f"{loss:.4f}" for loss in losses)
    return facts | {"versions": ", ".join(_versions())}


def first_and_last(
    records: list[dict[str, float]], name: str, best_step: int | None = None
) -> tuple[float, float] | None:
    """A number of the first evaluation, and of that of what was saved; None where there is none."""
    found = {r["step"]: r[name] for r in records if r.get(name) is not None}
    if not found:
        return None
    values = list(found.values())
    return values[0], found.get(best_step or -1, values[-1])


def card_details(recipe: Recipe, plan: str) -> dict[str, str]:
    """The recipe and the plan, as texts without this machine's paths."""
    tables = {name: _public(values) for name, values in recipe.tables().items()}
    name = recipe.model.pretrained_model_name_or_path
    tables["model"] |= {"pretrained_model_name_or_path": public_name(name)}
    tables["model"].pop("cache_dir", None)
    return {"Recipe": dump_toml(tables), "Plan": without_paths(plan)}


def data_fingerprint(data: str) -> str | None:
    """sha256 of a file of rows, of a folder that of its files' list; None for a hub's rows."""
    path = Path(data)
    if path.is_file():
        return _sha256(path)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else []
    listed = "".join(f"{_sha256(file)}  {file.relative_to(path)}\n" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest() if files else None


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def license_of(base: str) -> str | None:
    """The licence that the card of a base's folder names, if it is one word of the hub's."""
    path = Path(base) / "README.md"
    if not path.is_file() or path.stat().st_size > 1 << 20:
        return None
    try:
        found = ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except Exception:  # whatever is wrong with it, it names no licence
        return None
    name = getattr(found.data, "license", None)
    return name if isinstance(name, str) else None


def write_merged_card(run: Path, adapter: Path, base: str, out: Path) -> None:
    """Write the card of a merged model into its folder, with what the run's folder tells.

    Of a run whose best step was saved, no step and no loss where its checkpoints are gone: nothing
    tells any more which one it was.

    Args:
        run: The run's folder, or the adapter's.
        adapter: The adapter's.
        base: Folder or hub id of the base.
        out: The merged model's folder.
    """
    facts, details = {}, {}
    if (run / "recipe.toml").is_file():
        recipe = load_recipe(run / "recipe.toml")
        has_best = bool(recipe.train.get("load_best_model_at_end"))
        best_step = find_best_step(run) if has_best else None
        file = run / "metrics.jsonl"
        is_known = file.is_file() and (best_step is not None or not has_best)
        facts = card_facts(recipe, read_metrics(file) if is_known else [], best_step)
        plan = run / "plan.txt"
        details = card_details(recipe, plan.read_text("utf-8") if plan.is_file() else "")
    text = merged_card_text(
        read_saved_config(adapter), facts, details=details, license_name=license_of(base)
    )
    write_text_aside(out / "README.md", text, overwrite=True)


def without_paths(text: str) -> str:
    """Text in which every path is its last part."""
    return _PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2] or "/", text)


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    is_path = isinstance(value, str) and "/" in value and not is_hub_id(value)
    return without_paths(value) if is_path else value


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
