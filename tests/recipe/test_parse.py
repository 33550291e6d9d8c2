import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.recipe.writing import RIGHT, spoil_recipe, write_recipe
from tplora.errors import RecipeError
from tplora.recipe.parse import load_recipe
from tplora.recipe.schema import DataTable, ExportTable, ModelTable, ParallelTable, Recipe


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides=overrides)
    return caught.value.problems


def problem_of_key(folder: Path, table: str, line: str) -> str:
    (problem,) = problems_of(spoil_recipe(folder, table, line))
    return problem


def test_reading_a_recipe_imports_nothing_heavy() -> None:
    code = (
        "import sys, tplora.recipe.parse\n"
        "print({'torch', 'transformers', 'peft', 'accelerate', 'trl'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path))
    assert recipe.name == "mine"
    assert recipe.model.pretrained_model_name_or_path == "someone/some-model"
    assert recipe.model.dtype == "auto"
    assert recipe.parallel == ParallelTable(tp_size="auto", check_every_steps=50)
    assert recipe.export == ExportTable(verify=True, merged=False)
    assert recipe.lora == {"target_modules": "all-linear"}
    assert recipe.train == {"max_steps": 3}


def test_local_paths_are_seen_from_the_recipe_not_from_where_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    path = write_recipe(tmp_path, ("someone/some-model", "base"))
    recipe = load_recipe(path)
    assert recipe.data.train == str(tmp_path / "rows.jsonl")
    assert recipe.model.pretrained_model_name_or_path == str(tmp_path / "base")


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        recipe.model.dtype = "float32"


@settings(deadline=None, max_examples=50)
@given(
    tp_size=st.just("auto") | st.integers(1, 64),
    dtype=st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    lora=st.dictionaries(
        st.text(st.characters(codec="ascii")), st.integers() | st.text(max_size=5)
    ),
    train=st.dictionaries(st.text(max_size=5), st.booleans() | st.floats(allow_nan=False)),
)
def test_a_recipe_written_as_toml_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    tp_size: int | str,
    dtype: str,
    lora: dict,
    train: dict,
) -> None:
    path = tmp_path_factory.mktemp("written") / "again.toml"
    recipe = Recipe(
        name="again",
        path=path,
        model=ModelTable(pretrained_model_name_or_path="a/b", dtype=dtype),
        parallel=ParallelTable(tp_size=tp_size),
        data=DataTable(train=str(path.with_name("rows.jsonl"))),
        export=ExportTable(),
        lora=lora,
        train=train,
    )
    path.write_text(recipe.to_toml(), encoding="utf-8", newline="")
    assert load_recipe(path) == recipe


def test_a_missing_recipe_names_the_nearest_one(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    (problem,) = problems_of(tmp_path / "mien.toml")
    assert problem == f"{tmp_path / 'mien.toml'}: no such file; did you mean mine.toml?"


def test_a_folder_in_place_of_a_recipe_is_one_line(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path)
    assert "cannot be read: Is a directory" in problem


def test_text_that_is_no_toml_names_file_and_line(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, ("max_steps = 3", "max_steps = "))
    (problem,) = problems_of(path)
    assert problem.startswith(f"{path}: not valid TOML: ")
    assert "line 11" in problem


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        (
            "model",
            'dtyp = "auto"',
            'model.dtyp = "auto" (line 2): unknown key; did you mean dtype?',
        ),
        ("model", 'torch_dtype = "auto"', "transformers calls it dtype; write `dtype`"),
        ("model", "dtype = 32", 'needs one of "auto", "float32", "bfloat16", "float16"'),
        ("model", 'device_map = "auto"', "tensor parallelism places the weights itself"),
        ("model", "load_in_4bit = true", "are those of the table [quantization]"),
        ("model", "quantization_config = { bits = 4 }", "are those of the table [quantization]"),
        ("model", 'sha256 = "abc"', "needs text in quotes, 64 hex digits in lower case"),
        ("model", "trust_remote_code = 1", "needs true or false"),
        ("parallel", "tp_size = true", 'needs a whole number of 1 or more, or "auto"'),
        ("parallel", "tp_size = 0", 'needs a whole number of 1 or more, or "auto"'),
        ("parallel", 'tp_size = "all"', 'needs a whole number of 1 or more, or "auto"'),
        ("parallel", "fsdp_size = 0", "needs a whole number of 1 or more"),
        ("parallel", "dp_replicate_size = 0", "needs a whole number of 1 or more"),
        ("parallel", "dp_shard_size = 2", "transformers calls it fsdp_size"),
        ("parallel", "pp_size = 2", "not supported yet"),
        ("parallel", "cp_size = 2", "not supported yet"),
        ("parallel", 'tp_plan = "auto"', "model's own tensor-parallel plan"),
        ("parallel", "sequence_parallel = 1", "needs true or false"),
        ("parallel", "check_every_steps = 0", "needs a whole number of 1 or more"),
        ("parallel", 'overlap_communication = "on"', 'needs true or false, or "auto"'),
        ("data", 'assistant_only_loss = "yes"', "needs true or false"),
        ("data", "eval = 3", "needs text in quotes"),
        ("export", 'merged = "out"', "needs true or false"),
    ],
)
def test_a_wrong_key_of_our_tables_is_one_line_that_says_what_is_needed(
    tmp_path: Path, table: str, line: str, words: str
) -> None:
    problem = problem_of_key(tmp_path, table, line)
    assert words in problem
    assert problem.startswith(f"{table}.")
    assert "(line " in problem
    assert "\n" not in problem


def test_missing_tables_and_keys_are_named(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, text="[model]\n\n[data]\n")
    assert problems_of(path) == (
        "[lora]: missing table; every recipe needs one",
        "model.pretrained_model_name_or_path (line 1): missing; "
        "needs text in quotes that is not empty",
        "data.train (line 3): missing; needs text in quotes that is not empty",
    )


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (f"{RIGHT}[quantisation]\nbits = 4", "quantisation (line 12): unknown table; did you mean"),
        (f"{RIGHT}[trian]\nseed = 3", "trian (line 12): unknown table; did you mean [train]?"),
        (f"parallel = 3\n{RIGHT}", "parallel (line 1): needs to be a table; write [parallel]"),
    ],
)
def test_a_table_that_is_none_of_ours_is_refused(tmp_path: Path, text: str, start: str) -> None:
    (problem,) = problems_of(write_recipe(tmp_path, text=text))
    assert problem.startswith(start)


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        ("[model]", "[model]\ndtype = 3\ndevice_map = 1"),
        ("[data]", "[data]\nassistant_only_loss = 0"),
        ("[train]", "[parallel]\ntp_size = 1.5\n\n[tain]"),
    )
    problems = problems_of(path)
    starts = ("tain", "model.dtype", "model.device_map", "parallel.tp_size", "data.assistant")
    assert len(problems) == len(starts)
    assert all(any(one.startswith(start) for one in problems) for start in starts)


def test_set_reads_its_value_as_toml_and_else_as_text(tmp_path: Path) -> None:
    recipe = load_recipe(
        write_recipe(tmp_path),
        overrides=[
            "train.max_steps=5",
            "train.optim=adamw_torch",
            'lora.target_modules=["q_proj", "v_proj"]',
            "parallel.tp_size = 2",
            "model.dtype=float32",
            "lora.rank_pattern.q_proj=4",
            "train.run_name=a=b",
        ],
    )
    assert recipe.train == {"max_steps": 5, "optim": "adamw_torch", "run_name": "a=b"}
    assert recipe.lora["target_modules"] == ["q_proj", "v_proj"]
    assert recipe.lora["rank_pattern"] == {"q_proj": 4}
    assert recipe.parallel.tp_size == 2
    assert recipe.model.dtype == "float32"


def test_set_is_checked_like_the_file_and_its_problems_name_it(tmp_path: Path) -> None:
    problems = problems_of(
        write_recipe(tmp_path), "parallel.tp_size=two", "model.dtpe=float32", "max_steps", "a=1"
    )
    assert problems == (
        "--set max_steps: needs table.key=value, such as --set train.max_steps=5",
        "--set a=1: needs table.key=value, such as --set train.max_steps=5",
        'model.dtpe = "float32" (--set): unknown key; did you mean dtype? '
        f"[model] takes {', '.join(ModelTable.model_fields)}",
        'parallel.tp_size = "two" (--set): needs a whole number of 1 or more, or "auto"',
    )


def test_set_cannot_reach_into_a_value(tmp_path: Path) -> None:
    (problem,) = problems_of(write_recipe(tmp_path), "train.max_steps.x=5")
    assert problem == (
        "--set train.max_steps.x=5: max_steps is a value, not a table; give table.key=value"
    )
