"""Rows as they are on disk or on the hub, read without a cache file that ranks could race on.

Local files are parsed here rather than by a dataset builder, so a row that cannot be decoded is
named by its file and line, and every rank reads the same rows in the same order.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from datasets import (
    Dataset,
    DatasetDict,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.table import InMemoryTable

from tplora.errors import DataError

__all__ = ["read_rows"]

_HUB_ID = re.compile(
    r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%+:-]+))?"
)
_HELD_OUT = re.compile(r"(^|[._-])(test|valid|validation|val|dev|eval)([._-]|$)")


def read_rows(spec: str, *, folder: Path, key: str) -> Dataset:
    """Read every row of a file, of a folder of such files, or of a data set on the hub.

    Files are json, jsonl, parquet, csv or arrow; a folder's are read in the order of their names.
    A hub id is ``owner/name``, ``owner/name:split`` or ``owner/name/config:split``; left out, the
    split is the only one there is, or "train" where `key` asks for training rows.

    Args:
        spec: What the recipe says.
        folder: The folder of the recipe, which relative paths start from.
        key: The recipe key, for messages.

    Raises:
        DataError: If there is no such thing, a row cannot be decoded, or there are no rows.
    """
    where = f'{key} = "{spec}"'
    path = folder / Path(spec).expanduser()
    try:
        if path.is_dir():
            rows = _read_folder(path)
        elif path.is_file():
            rows = _read_file(path)
        else:
            rows = _read_hub(spec, folder=folder, key=key)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    if len(rows) == 0:
        needed = "rows for one step at least are" if key == "data.train" else "at least one is"
        raise DataError(f"{where}: 0 rows; {needed} needed")
    return rows


def _read_folder(path: Path) -> Dataset:
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return load_from_disk(str(path), keep_in_memory=True)
    files = sorted(
        file
        for file in path.iterdir()
        if file.suffix in _READERS and file.is_file() and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"a folder without any data file; it may hold {', '.join(_READERS)}")
    held_out = [file.name for file in files if _HELD_OUT.search(file.stem)]
    if 0 < len(held_out) < len(files):
        raise DataError(
            f"the folder holds {', '.join(held_out)} beside other rows; name the file that is meant"
        )
    try:
        return concatenate_datasets([_read_file(file) for file in files])
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"its files do not have the same columns: {_one_line(error)}") from None


def _read_file(path: Path) -> Dataset:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"cannot read {path.suffix or 'this'} files; use {', '.join(_READERS)}")
    try:
        return reader(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path.name} cannot be read: {_one_line(error)}") from None


def _read_json(path: Path) -> Dataset:
    rows = list(_json_rows(path))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return Dataset.from_dict(columns, on_mixed_types="use_json")


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        while (first := file.read(1)) in b" \t\r\n\xef\xbb\xbf" and first:
            pass
    if path.suffix == ".json" and first == b"[":
        rows = _decoded(path.read_bytes(), where=path.name)
        assert isinstance(rows, list)  # it starts with a bracket
        for number, row in enumerate(rows, start=1):
            yield _object(row, where=f"{path.name}, row {number}")
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path.name}, line {number}"
                yield _object(_decoded(line, where=where), where=where)


def _decoded(text: bytes, *, where: str) -> object:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column" if error.lineno > 1 else "column"
        raise DataError(f"{where}: not JSON at {at} {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 at byte {error.start}") from None


def _object(row: object, *, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}; each row has to be a JSON object")
    return row


def _read_csv(path: Path) -> Dataset:
    # Every column is text, whatever its first rows look like: a prompt may well be a number.
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    names = pyarrow.csv.open_csv(path, parse_options=parse).schema.names
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
    return _in_memory(pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert))


def _read_parquet(path: Path) -> Dataset:
    return _in_memory(pyarrow.parquet.read_table(path))


def _read_arrow(path: Path) -> Dataset:
    with pa.memory_map(str(path)) as source:
        try:
            return _in_memory(pa.ipc.open_file(source).read_all())
        except pa.ArrowInvalid:
            source.seek(0)  # not the file format, so the stream format, which datasets writes
            return _in_memory(pa.ipc.open_stream(source).read_all())


def _in_memory(table: pa.Table) -> Dataset:
    return Dataset(InMemoryTable(table))


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".arrow": _read_arrow,
}


def _read_hub(spec: str, *, folder: Path, key: str) -> Dataset:
    hub_id = _HUB_ID.fullmatch(spec)
    near = _near_names(spec, folder=folder)
    if hub_id is None or near or _is_path(spec, folder=folder):
        raise DataError(f"no such file or folder under {folder}{_or_near(near)}")
    name, config, split = hub_id["name"], hub_id["config"], hub_id["split"]
    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # the hub's client raises errors of four libraries
        raise DataError(
            f"no such file under {folder}, and not to be had as a data set of the hub: "
            f"{_one_line(error)}"
        ) from None
    return _one_split(rows, key=key) if isinstance(rows, DatasetDict) else rows


def _one_split(splits: DatasetDict, *, key: str) -> Dataset:
    if len(splits) == 1:
        return next(iter(splits.values()))
    if key.endswith("train") and "train" in splits:
        return splits["train"]
    raise DataError(f"has the splits {', '.join(splits)}; say which, as in owner/name:split")


def _is_path(spec: str, *, folder: Path) -> bool:
    path = Path(spec)
    has_folder = len(path.parts) > 1 and (folder / path.parts[0]).is_dir()
    return path.suffix in _READERS or has_folder


def _near_names(spec: str, *, folder: Path) -> list[str]:
    parent = (folder / Path(spec).expanduser()).parent
    if not parent.is_dir():
        parent = folder
    names = sorted(entry.name for entry in parent.iterdir()) if parent.is_dir() else []
    near = difflib.get_close_matches(Path(spec).stem, {Path(name).stem for name in names}, n=3)
    return [name for name in names if Path(name).stem in near]


def _or_near(names: list[str]) -> str:
    return f"; near names there: {', '.join(names)}" if names else "; check the path"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
