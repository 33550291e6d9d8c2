"""Every check of a recipe in one entry: each table against its class, and against the others."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tplora.errors import RecipeError
from tplora.recipe.defaults import fill_defaults
from tplora.recipe.lora_rules import SUPPORTED, find_lora_problems, is_refused
from tplora.recipe.methods import DEFAULT_METHOD, METHODS, find_method_problems, method_of
from tplora.recipe.parse import build_recipe, read_document
from tplora.recipe.preference_rules import find_preference_problems
from tplora.recipe.quantization_rules import (
    find_autocast_problems,
    find_loftq_problems,
    find_quantization_problems,
)
from tplora.recipe.schema import TABLES, Recipe
from tplora.recipe.sequence_rules import find_sequence_problems
from tplora.recipe.train_rules import REFUSED_KEYS, find_train_problems
from tplora.recipe.upstream_fields import (
    UpstreamField,
    check_lora_config,
    lora_fields,
    train_fields,
)
from tplora.recipe.wording import Places, did_you_mean, say_problem

__all__ = ["check_recipe", "read_recipe"]

Tables = Mapping[str, Any]


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, check all of it, and fill in what tplora does when a key is left out.

    Raises:
        RecipeError: With everything that is wrong in any table, one line each.
    """
    document = read_document(path, overrides=overrides)
    recipe, problems = build_recipe(document)
    problems += _find_problems(document.tables, document.places)
    if recipe is None or problems:
        raise RecipeError(list(dict.fromkeys(problems)))
    return fill_defaults(recipe)


def check_recipe(recipe: Recipe) -> None:
    """Check a recipe against the upstream classes, its tables against each other, and its files.

    Raises:
        RecipeError: With everything that is wrong, one line each.
    """
    problems = list(_find_problems(recipe.tables(), recipe.where))
    if problems:
        raise RecipeError(problems)


def _find_problems(tables: Tables, places: Places) -> Iterator[str]:
    """Everything the tables' own models cannot see; takes tables that those models refused, too."""
    lora, train = _table(tables, "lora"), _table(tables, "train")
    yield from _lora_problems(lora, places) if "lora" in tables else ()
    yield from find_method_problems(train, _table(tables, "data"), places)
    yield from _train_problems(train, places)
    yield from _method_key_problems(tables, places)
    if "quantization" in tables:
        yield from find_quantization_problems(_table(tables, "quantization"), places)
    yield from _source_problems(_table(tables, "model"), places)
    yield from _loraplus_problems(lora, places)
    yield from find_loftq_problems(lora, _table(tables, "quantization"), places)
    yield from find_autocast_problems(train, _table(tables, "quantization"), places)
    yield from find_sequence_problems(_table(tables, "parallel"), train, places)
    yield from _token_problems(_table(tables, "model"), lora, places)
    yield from _file_problems(_table(tables, "data"), places)
    yield from _eval_problems(_table(tables, "data"), train, places)


def _table(tables: Tables, name: str) -> Mapping[str, Any]:
    table = tables.get(name, {})
    return table if isinstance(table, dict) else {}


def _lora_problems(lora: Mapping[str, Any], places: Places) -> Iterator[str]:
    fields = lora_fields()
    wrong = dict(_name_problems("lora", lora, fields, places))
    yield from wrong.values()
    right = {key: value for key, value in lora.items() if key not in wrong}
    defaults = {key: field.default for key, field in fields.items()}
    broken = list(find_lora_problems(right, defaults, places, given=lora))
    yield from broken
    if not wrong and not broken:
        try:
            check_lora_config(lora)
        except (TypeError, ValueError) as error:
            yield say_problem(["lora"], f"peft refuses it: {error}", places=places)


def _train_problems(train: Mapping[str, Any], places: Places) -> Iterator[str]:
    method = method_of(train)
    if train.get("method", method) != method:
        return  # whose keys they are is not known
    fields = train_fields(method)
    wrong = dict(_name_problems("train", train, fields, places, method))
    yield from wrong.values()
    right = {key: value for key, value in train.items() if key not in wrong}
    defaults = {key: field.default for key, field in fields.items()}
    yield from find_train_problems(right, defaults, places, method=method)


def _method_key_problems(tables: Tables, places: Places) -> Iterator[str]:
    train, parallel = _table(tables, "train"), _table(tables, "parallel")
    method, fields = method_of(train), train_fields(method_of(train))
    sizes = [parallel.get(key, 1) for key in ("fsdp_size", "dp_replicate_size")]
    data_size = math.prod(size for size in sizes if isinstance(size, int))
    right = {
        key: value
        for key, value in train.items()
        if key in fields and not fields[key].say_need(value)
    }
    yield from find_preference_problems(method, right, places, data_size=data_size)


def _name_problems(
    table: str,
    values: Mapping[str, Any],
    fields: Mapping[str, UpstreamField],
    places: Places,
    method: str = DEFAULT_METHOD,
) -> Iterator[tuple[str, str]]:
    """Keys that are no field, or not of its type, each with its problem."""
    for key, value in values.items():
        if key not in fields:
            message = _say_unknown(table, key, fields, method)
        elif (table == "train" and key in REFUSED_KEYS) or (table == "lora" and is_refused(key)):
            continue  # its own reason says more than its type would
        elif table == "lora" and key == "init_lora_weights":
            continue  # peft's type spells out pissa_niter_N with a placeholder
        else:
            need = fields[key].say_need(value)
            message = f"needs {need}" if need else ""
        if message:
            yield key, say_problem([table, key], message, places=places, value=value)


def _say_unknown(table: str, key: str, fields: Mapping[str, UpstreamField], method: str) -> str:
    for other, names in _other_names(table).items():
        if key in names:
            return f"unknown key here; it belongs in [{other}]"
    others = [other for other in METHODS if table == "train" and key in train_fields(other)]
    if others:
        named = " or ".join(f'"{other}"' for other in others)
        return f'is of method = {named}, this is "{method}"; leave it out'
    near = did_you_mean(key, SUPPORTED if table == "lora" else set(fields) - set(REFUSED_KEYS))
    hint = f"did you mean {', '.join(near)}? " if near else ""
    if table == "lora":
        return f"unknown key; {hint}LoraConfig fields that can be used: {', '.join(SUPPORTED)}"
    return f"unknown key; {hint}[train] takes the fields of trl's {METHODS[method].config}"


def _other_names(table: str) -> Mapping[str, Sequence[str]]:
    ours = {name: tuple(model.model_fields) for name, model in TABLES.items()}
    theirs = {"train": tuple(train_fields())} if table == "lora" else {"lora": SUPPORTED}
    return ours | theirs


def _source_problems(model: Mapping[str, Any], places: Places) -> Iterator[str]:
    source, sha256 = model.get("pretrained_model_name_or_path"), model.get("sha256")
    if not isinstance(source, str):
        return
    path, is_wheel = ["model", "pretrained_model_name_or_path"], source.startswith("pypi:")
    name, pinned, version = source.removeprefix("pypi:").partition("==")
    if is_wheel and not (name and pinned and version):
        yield say_problem(path, "needs pypi:NAME==VERSION", places=places, value=source)
    if is_wheel and sha256 is None:
        message = "missing; a pypi: source needs the wheel's sha256, 64 hex digits"
        yield say_problem(["model", "sha256"], message, places=places)
    if sha256 is not None and not is_wheel:
        message = "is compared for pypi: sources only; leave it out"
        yield say_problem(["model", "sha256"], message, places=places, value=sha256)
    if Path(source).is_absolute() and not Path(source).exists():
        yield say_problem(path, _say_missing(Path(source)), places=places, value=source)


def _loraplus_problems(lora: Mapping[str, Any], places: Places) -> Iterator[str]:
    if "loraplus_lr_embedding" in lora and "loraplus_lr_ratio" not in lora:
        message = "has no effect without loraplus_lr_ratio; give both"
        value = lora["loraplus_lr_embedding"]
        yield say_problem(["lora", "loraplus_lr_embedding"], message, places=places, value=value)


def _token_problems(
    model: Mapping[str, Any], lora: Mapping[str, Any], places: Places
) -> Iterator[str]:
    new, path = model.get("add_tokens"), ["model", "add_tokens"]
    if not isinstance(new, list):
        return
    if len(set(map(str, new))) < len(new):
        yield say_problem(path, "names a token twice; name each once", places=places, value=new)
    if "adapter_name_or_path" in lora:
        message = "the adapter that is started from brings its tokens; leave it out"
        yield say_problem(path, message, places=places, value=new)


def _file_problems(data: Mapping[str, Any], places: Places) -> Iterator[str]:
    for key in ("train", "eval"):
        text = data.get(key)
        if isinstance(text, str) and text and not Path(text).exists():
            yield say_problem(["data", key], _say_missing(Path(text)), places=places, value=text)


def _say_missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"no such file; the folder {path.parent} does not exist either"
    siblings = sorted(entry.name for entry in path.parent.iterdir())
    near = did_you_mean(path.name, siblings)
    if near:
        return f"no such file; did you mean {' or '.join(near)}?"
    return f"no such file; {path.parent} has {', '.join(siblings[:5]) or 'no files'}"


def _eval_problems(
    data: Mapping[str, Any], train: Mapping[str, Any], places: Places
) -> Iterator[str]:
    strategy = train.get("eval_strategy")
    evaluates = strategy not in (None, "no") or train.get("eval_on_start") is True
    if evaluates and "eval" not in data:
        yield say_problem(
            ["data", "eval"],
            "missing; [train] asks for an evaluation, which needs rows",
            places=places,
        )
    if strategy == "no" and not evaluates and "eval" in data:
        message = 'never read, because train.eval_strategy is "no"; leave one of them out'
        yield say_problem(["data", "eval"], message, places=places, value=data["eval"])
    if "eval_steps" in train and strategy != "steps":
        message = 'has no effect without eval_strategy = "steps"'
        yield say_problem(
            ["train", "eval_steps"], message, places=places, value=train["eval_steps"]
        )
    if "eval" not in data or strategy == "no":
        for key, value in train.items():
            if (key, value) in _JUDGES or (key == "early_stopping_patience" and value is not None):
                message = "follows what an evaluation says; give data.eval, and evaluate"
                yield say_problem(["train", key], message, places=places, value=value)


_JUDGES = (
    ("lr_scheduler_type", "reduce_lr_on_plateau"),
    ("load_best_model_at_end", True),
    ("save_strategy", "best"),
)
"""What decides by evaluations."""
