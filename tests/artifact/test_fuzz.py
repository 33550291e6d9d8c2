"""Mutated adapter folders: each is read, or refused in our words; nothing runs, nothing escapes."""

import os
import random
import shutil
import warnings

import pytest

from tests.artifact.mutate import mutate
from tests.artifact.tiny import write_adapter, write_base
from tests.merging import merge_one
from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.inspection import inspect_adapter
from tplora.errors import TploraError
from tplora.plan.lora import build_lora_config


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


NUM_FAST, NUM_SLOW = 300, 10_000


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    write_base(folder / "base", num_hidden_layers=1)
    write_adapter(folder / "base", folder / "good", target_modules=["q_proj", "down_proj"])
    (folder / "good" / "tokenizer.json").write_text("{}")
    (folder / "good" / "tokenizer_config.json").write_text("{}")
    (folder / "outside.txt").write_text("a secret")
    return folder


def _fuzz(place, seeds):
    """Which seeds end otherwise than they may, and how many were taken."""
    wrong, num_read = [], 0
    before = _outside(place)
    for seed in seeds:
        case, out, mark = place / "case", place / "out", place / "mark"
        for folder in (case, out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(place / "good", case)
        rng = random.Random(seed)
        done = mutate(case, rng, mark)
        try:
            inspect_adapter(case)
            read_adapter(case)
            num_read += 1
            build_lora_config({"adapter_name_or_path": str(case)}, None)
            merge_one(str(place / "base"), case, out)
        except TploraError as error:
            text = str(error)
            if "\n" in text or len(text) > 2000 or not text.isprintable():
                wrong.append((seed, done, f"says {text[:300]!r}"))
        except BaseException as error:
            wrong.append((seed, done, repr(error)[:300]))
        leaked = [path.name for path in out.rglob("*") if b"a secret" in path.read_bytes()]
        if _outside(place) != before or leaked or mark.exists():
            wrong.append((seed, done, "something was run, or written or copied elsewhere"))
            break
    return wrong, num_read


def _outside(place):
    ours = (place / "case", place / "out")
    return {
        (path, path.lstat().st_mtime_ns)
        for path in place.rglob("*")
        if path not in ours and not any(one in path.parents for one in ours)
    }


def _check(place, seeds):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft says of odd configs
        wrong, num_read = _fuzz(place, seeds)
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert len(seeds) / 20 < num_read < len(seeds) / 2  # both ends are reached


def test_a_mutated_folder_is_read_or_refused(place):
    _check(place, range(NUM_FAST))


@pytest.mark.slow
def test_ten_thousand_mutated_folders_are_read_or_refused(place):
    _check(place, range(NUM_FAST, NUM_FAST + NUM_SLOW))
