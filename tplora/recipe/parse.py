"""TOML text and ``--set`` overrides to a recipe, every mistake found at once. Needs no torch."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ValidationError

from tplora.errors import RecipeError
from tplora.recipe.lines import find_lines
from tplora.recipe.refusals import REFUSED, REFUSED_TABLES
from tplora.recipe.schema import TABLES, Recipe
from tplora.recipe.wording import Places, did_you_mean, say_problem, say_type

__all__ = ["Document", "build_recipe", "load_recipe", "read_document"]

_NAMES = (*TABLES, "lora", "train")
_NEEDED = ("model", "lora", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A recipe's text as plain values: overrides applied, paths absolute, nothing checked yet."""

    path: Path
    tables: dict[str, Any]
    places: Places
    problems: tuple[str, ...]
    """Overrides that could not be applied."""


def load_recipe(path: Path, *, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe; ``overrides`` are ``table.key=value``, as ``--set`` takes them.

    The names and types inside ``[lora]`` and ``[train]`` are not looked at here: ``check`` does.

    Raises:
        RecipeError: With everything that is wrong, one line each.
    """
    recipe, problems = build_recipe(read_document(path, overrides=overrides))
    if recipe is None or problems:
        raise RecipeError(problems)
    return recipe


def read_document(path: Path, *, overrides: Sequence[str] = ()) -> Document:
    """Read the TOML and apply the overrides.

    Raises:
        RecipeError: If there is no such file, or it is not TOML.
    """
    text = _read_text(path)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([f"{path}: not valid TOML: {error}"]) from None
    places = {key: f"line {line}" for key, line in find_lines(text).items()}
    problems = []
    for override in overrides:
        problem = _apply_override(tables, places, override)
        problems += [problem] if problem else []
    for name in ("model", "data", "lora"):
        if isinstance(tables.get(name), dict):
            tables[name] = _absolute(name, tables[name], path)
    return Document(path=path, tables=tables, places=places, problems=tuple(problems))


def build_recipe(document: Document) -> tuple[Recipe | None, list[str]]:
    """The recipe, if the tables of our own are right, and every problem found on the way."""
    problems = [*document.problems, *_table_problems(document)]
    models: Any = {}
    for name, table in TABLES.items():
        values = document.tables.get(name, None if name in _NEEDED else {})
        if not isinstance(values, dict):
            continue  # missing or not a table: _table_problems has said it
        try:
            models[name] = table.model_validate(values)
        except ValidationError as error:
            problems += _say_errors(name, values, error, document.places)
    if problems:
        return None, problems
    recipe = Recipe(
        name=document.path.stem,
        path=document.path,
        lora=dict(document.tables.get("lora", {})),
        train=dict(document.tables.get("train", {})),
        where=document.places,
        **models,
    )
    return recipe, []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(p.name for p in path.parent.glob("*.toml"))
        near = did_you_mean(path.name, siblings) or siblings[:3]
        hint = f"; did you mean {' or '.join(near)}?" if near else "; a recipe is a .toml file"
        raise RecipeError([f"{path}: no such file{hint}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError([f"{path}: cannot be read: {reason}; a recipe is a .toml file"]) from None


def _apply_override(
    tables: dict[str, Any], places: dict[tuple[str, ...], str], override: str
) -> str | None:
    """Put one ``table.key=value`` into the tables; the text of the problem if it cannot be."""
    name, equals, text = override.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or len(path) < 2 or not all(path):
        return f"--set {override}: needs table.key=value, such as --set train.max_steps=5"
    inner: Any = tables
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            return f"--set {override}: {part} is a value, not a table; give table.key=value"
    inner[path[-1]] = _override_value(text.strip())
    places[path] = "--set"
    return None


def _override_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text  # a shell eats quotes, so --set model.dtype=float32 has to do
    return parsed["value"] if set(parsed) == {"value"} else text


def _table_problems(document: Document) -> list[str]:
    problems = []
    for name, values in document.tables.items():
        if name in REFUSED_TABLES:
            message = REFUSED_TABLES[name]
        elif name not in _NAMES:
            near = did_you_mean(name, _NAMES)
            hint = f"did you mean [{']or ['.join(near)}]? " if near else ""
            message = f"unknown table; {hint}a recipe has {', '.join(f'[{n}]' for n in _NAMES)}"
        elif not isinstance(values, dict):
            message = f"needs to be a table; write [{name}]"
        else:
            continue
        problems.append(say_problem([name], message, places=document.places))
    missing = [name for name in _NEEDED if name not in document.tables]
    problems += [f"[{name}]: missing table; every recipe needs one" for name in missing]
    return problems


def _say_errors(
    table: str, values: Mapping[str, Any], error: ValidationError, places: Places
) -> list[str]:
    """One line per key; a union reports each of its members, and one line says them all."""
    lines: dict[str, str] = {}
    for found in error.errors():
        key = str(found["loc"][0])
        value = None if found["type"] == "missing" else values.get(key)
        message = _say_key(table, key, found["type"])
        lines.setdefault(key, say_problem([table, key], message, places=places, value=value))
    return list(lines.values())


def _say_key(table: str, key: str, kind: str) -> str:
    fields = TABLES[table].model_fields
    if kind == "extra_forbidden":
        if (table, key) in REFUSED:
            return REFUSED[table, key]
        near = did_you_mean(key, fields)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        return f"unknown key; {hint}[{table}] takes {', '.join(fields)}"
    needs = say_type(get_type_hints(TABLES[table], include_extras=True)[key])
    if kind == "missing":
        return f"missing; needs {needs}"
    return f"needs {needs}"


def _absolute(table: str, values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Local paths as seen from the recipe's folder; a hub id stays as it is."""
    values, folder = dict(values), path.resolve().parent
    keys = {
        "data": ("train", "eval"),
        "model": ("pretrained_model_name_or_path",),
        "lora": ("adapter_name_or_path",),
    }[table]
    for key in keys:
        text = values.get(key)
        if not isinstance(text, str) or not text:
            continue
        may_be_hub_id = (table == "lora" and _may_be_on_hub(text, folder)) or table == "model"
        if not may_be_hub_id or _is_local(text, folder):
            values[key] = str((folder / Path(text).expanduser()).resolve())
    return values


def _is_local(text: str, folder: Path) -> bool:
    if text.startswith("pypi:"):
        return False
    looks_local = text.startswith((".", "/", "~")) or text.endswith(".gguf")
    return looks_local or (folder / text).exists()


def _may_be_on_hub(text: str, folder: Path) -> bool:
    """A folder's name with a slip in it is not sent to the hub as somebody's repository."""
    return text.count("/") == 1 and not (folder / text).parent.is_dir()
