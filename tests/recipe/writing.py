"""A small right recipe on disk, for tests to spoil."""

from pathlib import Path

import pytest

from tplora.errors import RecipeError
from tplora.recipe.check import read_recipe

RIGHT = """\
[model]
pretrained_model_name_or_path = "someone/some-model"

[lora]
target_modules = "all-linear"

[data]
train = "rows.jsonl"

[train]
max_steps = 3
"""


def write_recipe(folder: Path, *replacements: tuple[str, str], text: str = RIGHT) -> Path:
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    (folder / "rows.jsonl").touch()
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def spoil_recipe(folder: Path, table: str, line: str) -> Path:
    """A right recipe with ``line`` put first into ``table``."""
    text = RIGHT if f"[{table}]" in RIGHT else f"{RIGHT}\n[{table}]\n"
    return write_recipe(folder, (f"[{table}]\n", f"[{table}]\n{line}\n"), text=text)


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    return caught.value.problems


def problem_of_key(folder: Path, table: str, line: str) -> str:
    """The one problem of a right recipe with ``line`` put into ``table``."""
    (problem,) = problems_of(spoil_recipe(folder, table, line))
    return problem
