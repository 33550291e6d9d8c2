"""Rows that are too few for one step end a run on every rank, with counts, before a model loads."""

import json
from unittest import mock

import pytest

from tplora.errors import DataError
from tplora.recipe.check import read_recipe
from tplora.run.finetune import run_finetune

pytestmark = pytest.mark.world


def _chat(question, answer):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns}) + "\n"


ROW, LONG = _chat("what is 1", "one"), _chat("and more " * 200, "one")
# The file's name, what it holds, what is said; a step takes two rows.
KINDS = {
    "nothing": ("rows.jsonl", "", "0 rows; "),
    "blank lines": ("rows.jsonl", "\n \n\n", "0 rows; "),
    "an empty list": ("rows.json", "[]", "0 rows; "),
    "a header": ("rows.csv", "prompt,completion\n", "0 rows; "),
    "an empty list file": ("rows.json", "", "0 rows; "),
    "empty rows": ("rows.jsonl", '{"messages": []}\n' * 3, "3 empty (rows 1, 2, 3)"),
    "answers cut off": ("rows.jsonl", LONG * 3, "3 without a supervised token in its first"),
    "fewer than a step": ("rows.jsonl", ROW, "1 rows, but one step takes"),
    "fewer once some are dropped": ("rows.jsonl", LONG * 9 + ROW, "1 rows, but one step takes"),
}


ALSO_EVALUATED = ("nothing", "answers cut off", "fewer than a step")


def _refusals(place, folder):
    """What each kind is refused with, as rows to train on and some as rows to evaluate on."""
    found = {}
    with (
        mock.patch("tplora.run.finetune.leave_process_group"),
        mock.patch("tplora.run.finetune.load_model", side_effect=AssertionError("loaded")),
    ):
        for kind, (name, _, _) in KINDS.items():
            for key in ("data.train", *["data.eval"] * (kind in ALSO_EVALUATED)):
                rows = folder / kind / name
                override = [f'{key}="{rows}"', "train.max_length=64"]
                recipe = read_recipe(place / "recipe.toml", override)
                try:
                    run_finetune(recipe, folder / "run")
                except (DataError, AssertionError) as error:
                    found[kind, key] = str(error)
    return found


def test_rows_that_are_too_few_are_refused_with_counts_before_a_model_loads(
    world2, place, tmp_path
):
    for kind, (name, text, _) in KINDS.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_text(text)
    first, second = world2.run(_refusals, place, tmp_path)
    assert first == second
    for (kind, key), said in first.items():
        if (kind, key) == ("fewer than a step", "data.eval"):
            assert said == "loaded", "one row is enough to evaluate on"
        else:
            assert said.startswith(key), kind
            assert KINDS[kind][2] in said, kind
    assert len(first) == len(KINDS) + len(ALSO_EVALUATED)
