"""Before a run goes on: whether it is the same run, whether anything is left to do, and from where.

Looks only; what an earlier end of the run left is removed when the ranks have met.
"""

from __future__ import annotations

import math
import tomllib
from typing import TYPE_CHECKING, Any

from tplora.artifact.verify import has_passed
from tplora.errors import ArtifactError, RecipeError
from tplora.recipe.toml import dump_value
from tplora.recipe.upstream_fields import train_fields
from tplora.train.checkpoint_files import find_last_checkpoint, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tplora.recipe.schema import Recipe

__all__ = ["NothingToResumeError", "find_resume"]

_END = ("train.max_steps", "train.num_train_epochs")
# What may differ from the run that is resumed: how far it goes, what it writes, over how many
# ranks. Nothing here changes a step. A name that ends in _ or . stands for all that begin with it.
_MAY_CHANGE = (
    *_END, "train.save_", "train.logging_steps", "train.eval_", "parallel.", "export.",
)  # fmt: skip
# A step's rows are the product of these and of the data ranks: each may change, the product not.
_DATA_AXES = ("parallel.fsdp_size", "parallel.dp_replicate_size")
_ROWS = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps")


class NothingToResumeError(ArtifactError):
    """There is no run, or it has come to no checkpoint."""


def find_resume(recipe: Recipe, folder: Path, *, say: Callable[[str], None]) -> Path | None:
    """The checkpoint from which the run in ``folder`` goes on; None if the run is complete.

    Args:
        recipe: As it is now.
        folder: The run's folder.
        say: Called with one line for each checkpoint that is damaged and passed over.

    Raises:
        RecipeError: If the recipe is no longer that of the run: a line for each key, was and is.
        NothingToResumeError: If there is no run, or it has no checkpoint.
        ArtifactError: If its last one is past the end that the recipe has now.
    """
    changed = _changed_keys(recipe, folder)
    rows = [_rows_per_step(tables) for tables in _was_and_is(recipe, folder)]
    is_same_step = rows[0] == rows[1]
    problems = [
        line
        for key, line in changed.items()
        if not (_may_change(key) or (is_same_step and key in _ROWS))
    ]
    if not is_same_step and not problems:
        problems = [
            f"parallel: a step had {rows[0]} rows, has {rows[1]}: the run would go on at other "
            "rows; keep data ranks x train.per_device_train_batch_size x "
            f"train.gradient_accumulation_steps at {rows[0]}"
        ]
    if problems:
        raise RecipeError(problems)
    if _is_complete(recipe, folder) and not set(changed) & set(_END):
        return None
    checkpoint = find_last_checkpoint(folder, say=say)
    if checkpoint is None:
        raise NothingToResumeError(
            f"{folder}: has no checkpoint to resume; start again with --overwrite, and with "
            'train.save_strategy = "steps" in the recipe'
        )
    _check_not_past(recipe, checkpoint)
    return checkpoint


def _is_complete(recipe: Recipe, folder: Path) -> bool:
    """The adapter is the last thing that training writes; what is asked for beyond follows it."""
    has_merged = (folder / "merged").is_dir() or not recipe.export.merged
    is_verified = has_passed(folder / "adapter") or not recipe.export.verify
    has_adapter = (folder / "adapter" / "adapter_config.json").is_file()
    return has_adapter and is_verified and has_merged


def _changed_keys(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Every key that differs from the run's, with the line that says how."""
    before, after = _was_and_is(recipe, folder)
    return {
        key: f"{key}: was {_say(before, key)}, is {_say(after, key)}; a run that is resumed keeps "
        f"it: put it back, or start another run with --output"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    }


def _was_and_is(recipe: Recipe, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of the run's recipe and of this one, by their path."""
    was, now = _read_run_recipe(folder / "recipe.toml"), tomllib.loads(recipe.to_toml())
    return _flat(was), _flat(now)


def _rows_per_step(values: Mapping[str, Any]) -> int:
    usual = {f"train.{name}": field.default for name, field in train_fields().items()}
    usual |= dict.fromkeys(_DATA_AXES, 1)
    sizes: list[int] = [values.get(key, usual[key]) for key in (*_ROWS, *_DATA_AXES)]
    return math.prod(sizes)


def _read_run_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NothingToResumeError(
            f"{path.parent}: holds no run to resume; start it without --resume"
        ) from None
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path}: cannot be read ({error}); the recipe of the run is needed to resume it"
        ) from None


def _flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()
    }


def _say(values: Mapping[str, Any], key: str) -> str:
    return dump_value(values[key]) if key in values else "left out"


def _may_change(key: str) -> bool:
    return any(key.startswith(name) if name[-1] in "_." else key == name for name in _MAY_CHANGE)


def _check_not_past(recipe: Recipe, checkpoint: Path) -> None:
    state = read_state(checkpoint)
    for key, reached in (("max_steps", "global_step"), ("num_train_epochs", "epoch")):
        end = recipe.train.get(key)
        is_end = end is not None and (key == "max_steps" or "max_steps" not in recipe.train)
        if is_end and state.get(reached, 0) > end:
            raise ArtifactError(
                f"{checkpoint}: has trained {state[reached]:g}, past train.{key} = {end}; raise "
                "it, or move the checkpoint away to go on from an earlier one"
            )
