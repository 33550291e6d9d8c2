"""``[quantization]`` takes the names of ``BitsAndBytesConfig``; what is not exact is refused."""

from pathlib import Path

import pytest

from tests.recipe.writing import RIGHT, problems_of, write_recipe
from tplora.plan.quantization import build_quantization_config
from tplora.recipe.check import check_recipe, read_recipe

FOUR = 'load_in_4bit = true\nbnb_4bit_quant_type = "nf4"\n'


def _write(tmp_path: Path, lines: str) -> Path:
    return write_recipe(tmp_path, text=f"{RIGHT}\n[quantization]\n{lines}\n")


def test_a_recipe_without_the_table_quantises_nothing(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path))
    assert "quantization" not in recipe.tables()
    assert build_quantization_config(recipe.quantization) is None


def test_the_table_becomes_the_config_that_transformers_takes(tmp_path: Path) -> None:
    lines = FOUR + (
        'bnb_4bit_compute_dtype = "bfloat16"\nbnb_4bit_use_double_quant = true\n'
        'bnb_4bit_quant_storage = "bfloat16"\nllm_int8_skip_modules = ["lm_head", "o_proj"]'
    )
    recipe = read_recipe(_write(tmp_path, lines))
    config = build_quantization_config(recipe.quantization)
    assert config is not None
    found = config.to_dict()
    assert found["load_in_4bit"] is True
    assert found["bnb_4bit_quant_type"] == "nf4"
    assert found["bnb_4bit_compute_dtype"] == found["bnb_4bit_quant_storage"] == "bfloat16"
    assert found["bnb_4bit_use_double_quant"] is True
    assert found["llm_int8_skip_modules"] == ["lm_head", "o_proj"]


def test_a_kept_recipe_reads_back_equal(tmp_path: Path) -> None:
    recipe = read_recipe(_write(tmp_path, FOUR))
    check_recipe(recipe)
    again = tmp_path / "again.toml"
    again.write_text(recipe.to_toml(), encoding="utf-8")
    assert read_recipe(again).quantization == recipe.quantization
    assert read_recipe(again).tables() == recipe.tables()


@pytest.mark.parametrize(
    ("lines", "start", "words"),
    [
        ("", "quantization (line 13)", "set load_in_4bit = true or load_in_8bit = true"),
        (f"{FOUR}load_in_8bit = true", "quantization.load_in_8bit = true", "keep one of them"),
        (
            'load_in_8bit = true\nbnb_4bit_quant_type = "nf4"',
            'quantization.bnb_4bit_quant_type = "nf4" (line 15)',
            "has no effect in 8 bits",
        ),
        (f"{FOUR}llm_int8_threshold = 5.0", "quantization.llm_int8_threshold", "no outliers"),
        (f"{FOUR}llm_int8_has_fp16_weight = true", "quantization.llm_int8_has", "16-bit weights"),
        (
            f"{FOUR}llm_int8_enable_fp32_cpu_offload = true",
            "quantization.llm_int8_enable_fp32_cpu_offload",
            "every rank holds its pieces on its device",
        ),
        (
            f"{FOUR}bnb_4bit_quant_typ = 1",
            "quantization.bnb_4bit_quant_typ",
            "did you mean bnb",
        ),
        ('load_in_4bit = "yes"', "quantization.load_in_4bit", "needs true or false"),
        (
            'load_in_4bit = true\nbnb_4bit_quant_type = "int4"',
            "quantization.bnb_4bit_quant_type",
            'needs "nf4", or "fp4"',
        ),
    ],
)
def test_a_wrong_table_is_one_line_that_says_what_to_do(
    tmp_path: Path, lines: str, start: str, words: str
) -> None:
    problem = problems_of(_write(tmp_path, lines))[0]
    assert problem.startswith(start)
    assert words in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("adamw_8bit", "blocks of 256 values"),
        ("paged_adamw_8bit", "blocks of 256 values"),
        ("paged_adamw_32bit", "do not step factors that are cut"),
    ],
)
def test_optimizers_of_bitsandbytes_are_refused_by_name(
    tmp_path: Path, name: str, why: str
) -> None:
    problems = problems_of(_write(tmp_path, FOUR), f"train.optim={name}")
    assert why in problems[0]
    assert problems[0].startswith(f'train.optim = "{name}"')
    assert "adamw_torch" in problems[0]
