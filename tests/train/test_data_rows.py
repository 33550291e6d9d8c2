import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tplora.errors import DataError
from tplora.train import rows as rows_module
from tplora.train.rows import read_rows

ROWS = [{"prompt": "1", "completion": "a\nb"}, {"prompt": "c, d", "completion": ""}]


def _write_jsonl(path: Path) -> None:
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")


def _write_json(path: Path) -> None:
    path.write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")


def _write_csv(path: Path) -> None:
    path.write_text('prompt,completion\n1,"a\nb"\n"c, d",\n')


def _write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path)


def _write_arrow(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def _write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("rows.jsonl", _write_jsonl),
        ("rows.json", _write_json),
        ("lines.json", _write_jsonl),
        ("rows.csv", _write_csv),
        ("rows.parquet", _write_parquet),
        ("rows.arrow", _write_arrow),
        ("file.arrow", _write_arrow_file),
    ],
)
def test_every_file_type_gives_the_same_rows(tmp_path, name, write):
    write(tmp_path / name)
    assert read_rows(name, folder=tmp_path, key="data.train").to_list() == ROWS


def test_reading_writes_no_file(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    for name, write in [
        ("a.jsonl", _write_jsonl),
        ("a.csv", _write_csv),
        ("a.arrow", _write_arrow),
    ]:
        write(tmp_path / name)
        assert read_rows(name, folder=tmp_path, key="data.train").cache_files == []
    assert not cache.exists()


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "README.md").write_text("no rows")
    assert read_rows(".", folder=tmp_path, key="data.train")["text"] == ["a", "b"]


def test_a_folder_saved_by_datasets_is_read(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    assert read_rows("saved", folder=tmp_path, key="data.train").to_list() == ROWS


def test_columns_that_only_later_rows_have_are_kept(tmp_path):
    (tmp_path / "r.jsonl").write_text('{"text": "a"}\n{"text": "b", "id": 1}\n')
    assert read_rows("r.jsonl", folder=tmp_path, key="data.train")["id"] == [None, 1]


def test_values_of_several_types_come_back_as_written(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "id": 1},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "b"}]}], "id": "x"},
    ]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert read_rows("r.jsonl", folder=tmp_path, key="data.train").to_list() == rows


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("r.jsonl", b'{"text": "a"}\n\n{"text": b}\n', r"r.jsonl, line 3: not JSON at column 10"),
        ("r.jsonl", b'{"text": "a"}\n["b"]\n', r"line 2: a list; each row has to be a JSON object"),
        ("r.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: not UTF-8 at byte 10"),
        ("r.json", b'[{"text": "a"},\n {"text": }]', r"not JSON at line 2, column 11"),
        ("r.json", b'[{"text": "a"}, 3]', r"row 2: a int; each row"),
        ("r.csv", b"text,id\na,1\nb\n", r"r.csv cannot be read: .*#3.*2 columns, got 1"),
        ("r.parquet", b"not parquet", r"r.parquet cannot be read"),
        ("r.arrow", b"not arrow at all", r"r.arrow cannot be read"),
        ("r.jsonl", b"\n\n", r"0 rows"),
        ("r.csv", b"text\n", r"0 rows"),
        ("r.txt", b"hello", r"cannot read .txt files; use .jsonl"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        read_rows(name, folder=tmp_path, key="data.train")
    assert str(caught.value).startswith(f'data.train = "{name}": ')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["data/trian.jsonl", "data/trian", "trian.jsonl"])
def test_a_missing_file_is_refused_with_near_names(tmp_path, spec):
    for folder in (tmp_path, tmp_path / "data"):
        folder.mkdir(exist_ok=True)
        (folder / "train.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"no such file or folder under .*near names.*train\.jsonl"):
        read_rows(spec, folder=tmp_path, key="data.train")


def test_a_folder_with_held_out_rows_is_refused(tmp_path):
    for name in ("train-0", "train-1", "test-0"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match=r"holds test-0.jsonl beside other rows"):
        read_rows(".", folder=tmp_path, key="data.train")


def test_a_folder_with_different_columns_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "b.jsonl").write_text('{"text": 1}')
    with pytest.raises(DataError, match="do not have the same columns"):
        read_rows(".", folder=tmp_path, key="data.train")


def test_a_folder_without_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="a folder without any data file"):
        read_rows(".", folder=tmp_path, key="data.train")


@pytest.fixture
def hub(monkeypatch):
    splits = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "validation")}

    def load(name, config, *, split):
        if name == "no/where":
            raise ConnectionError("cannot reach\nthe hub")
        rows = splits if config is None else {"only": Dataset.from_dict({"text": [config]})}
        return DatasetDict(rows) if split is None else rows[split]

    monkeypatch.setattr(rows_module, "load_dataset", load)


@pytest.mark.parametrize(
    ("spec", "key", "text"),
    [
        ("owner/name", "data.train", "train"),
        ("owner/name:validation", "data.eval", "validation"),
        ("owner/name/config", "data.eval", "config"),
        ("owner/name/config:only", "data.eval", "config"),
    ],
)
def test_a_hub_id_chooses_split_and_configuration(hub, tmp_path, spec, key, text):
    assert read_rows(spec, folder=tmp_path, key=key)["text"] == [text]


def test_evaluation_rows_never_come_from_a_split_that_was_guessed(hub, tmp_path):
    with pytest.raises(DataError, match="has the splits train, validation; say which"):
        read_rows("owner/name", folder=tmp_path, key="data.eval")


def test_a_hub_that_does_not_answer_is_a_data_error_on_one_line(hub, tmp_path):
    with pytest.raises(DataError, match=r"not to be had .* of the hub: cannot reach the hub$"):
        read_rows("no/where", folder=tmp_path, key="data.train")
