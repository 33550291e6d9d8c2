import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tplora.recipe.check import read_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
ROWS = RECIPES / "data"
MADE_WITH = (3, 11, 7)  # a later release may word a docstring anew


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_is_right_and_says_how_to_run_it(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    header = path.read_text(encoding="utf-8").splitlines()[0]
    assert header == f"# tplora finetune recipes/{path.name}"


def read_rows(kind: str) -> list[tuple[str, str]]:
    lines = (ROWS / f"python-builtins-{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines:
        question, answer = json.loads(line)["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        rows.append((question["content"], answer["content"]))
    return rows


def subject_of(question: str) -> str:
    return question.split("`")[1]


def kind_of(question: str) -> str:
    return re.sub("`[^`]+`", "it", question)


def test_rows_are_many_short_and_without_twins() -> None:
    train, evaluation = read_rows("train"), read_rows("eval")
    assert len(train) >= 240
    assert len(evaluation) >= 48
    assert len(set(train + evaluation)) == len(train) + len(evaluation)
    assert all(2 < len(answer.split()) <= 60 for _, answer in train + evaluation)
    assert all(answer.endswith(".") and answer.isascii() for _, answer in train + evaluation)


def test_eval_rows_ask_the_same_kinds_of_question_about_other_subjects() -> None:
    train, evaluation = read_rows("train"), read_rows("eval")
    trained = {subject_of(question) for question, _ in train}
    asked = {subject_of(question) for question, _ in evaluation}
    assert not trained & asked
    assert {kind_of(question) for question, _ in train} == {
        kind_of(question) for question, _ in evaluation
    }


@pytest.mark.skipif(
    sys.version_info[:3] != MADE_WITH,
    reason=f"the rows are facts of Python {'.'.join(map(str, MADE_WITH))}",
)
def test_the_script_makes_the_shipped_rows_again(tmp_path: Path) -> None:
    script = ROWS / "make_python_builtins.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for kind in ("train", "eval"):
        name = f"python-builtins-{kind}.jsonl"
        assert (tmp_path / name).read_bytes() == (ROWS / name).read_bytes()


def test_the_script_makes_the_shipped_preferences_again(tmp_path: Path) -> None:
    """Both answers of a pair are to the same question, and are not the same."""
    script = ROWS / "make_preferences.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    for kind in ("train", "eval"):
        name = f"python-builtins-preferences-{kind}.jsonl"
        lines = (ROWS / name).read_text(encoding="utf-8").splitlines()
        assert (tmp_path / name).read_text(encoding="utf-8").splitlines() == lines
        for line in lines:
            row = json.loads(line)
            better, other = (row[key][0]["content"] for key in ("chosen", "rejected"))
            assert better != other
            assert (row["prompt"][0]["content"], better) in read_rows(kind)
