"""``[train] method``: what it takes, what it refuses by name, and what the best one asks for."""

from pathlib import Path

import pytest

from tests.recipe.writing import problems_of, write_recipe
from tplora.recipe.check import read_recipe
from tplora.recipe.methods import METHODS


def _recipe(folder: Path, lines: str, *, data: str = "") -> Path:
    return write_recipe(
        folder,
        ("max_steps = 3", f"max_steps = 3\n{lines}"),
        ('train = "rows.jsonl"', f'train = "rows.jsonl"\n{data}'),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"grpo"', "generates rows while it trains.*use|beforehand"),
        ('"PPO"', "generates rows while it trains"),
        ('"online-dpo"', "generates rows while it trains"),
        ('"rloo"', "generates rows while it trains"),
        ('"orpo"', "is in trl.experimental"),
        ('"reward"', "trains a score head, which a recipe does not load"),
        ('"gkd"', "a teacher's logits"),
        ('"dop"', 'needs one of "sft", "dpo", "kto"; did you mean "dpo"'),
        ("3", 'needs one of "sft", "dpo", "kto"'),
    ],
)
def test_a_method_that_is_not_there_is_refused_by_name(tmp_path: Path, line: str, words: str):
    (problem,) = problems_of(_recipe(tmp_path, f"method = {line}\nbeta = 0.1"))
    assert problem.startswith("train.method = ")
    assert any(word in problem for word in words.replace(".*", "|").split("|"))
    assert 'one of "sft", "dpo", "kto"' in problem


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("beta = 0.1", "beta", 'is of method = "dpo" or "kto", this is "sft"; leave it out'),
        ('method = "dpo"\npacking = true', "packing", 'is of method = "sft", this is "dpo"'),
        (
            'method = "dpo"\nbetta = 0.1',
            "betta",
            "did you mean beta? [train] takes the fields of tr",
        ),
        ('method = "dpo"\nbeta = 0.0', "beta", "needs to be more than 0"),
        ('method = "dpo"\nbeta = "a"', "beta", "needs a number"),
        ('method = "dpo"\nloss_type = "nll"', "loss_type", "needs one of sigmoid, hinge"),
        ('method = "dpo"\nloss_type = ["ipo", "x"]', "loss_type", "needs one of sigmoid, hinge"),
        ('method = "dpo"\nloss_weights = [1.0, 2.0]', "loss_weights", "one number for each loss"),
        ('method = "dpo"\nloss_type = "exo_pair"', "label_smoothing", "needs it above 0"),
        ('method = "dpo"\nlabel_smoothing = 0.5', "label_smoothing", "up to, but not, 0.5"),
        ('method = "dpo"\nf_divergence_type = "kl"', "f_divergence_type", "one of reverse_kl"),
        (
            'method = "dpo"\nf_divergence_type = "forward_kl"\nloss_type = "aot"',
            "f_divergence_type",
            "needs a loss_type of sigmoid",
        ),
        ('method = "dpo"\nld_alpha = 2.0', "ld_alpha", "needs a number from 0 to 1"),
        ('method = "dpo"\nprecompute_ref_log_probs = true', "precompute_ref_log_probs", "once per"),
        ('method = "dpo"\nsync_ref_model = true', "sync_ref_model", "without an adapter"),
        ('method = "dpo"\npadding_free = true', "padding_free", 'trl has it for method = "sft"'),
        (
            'method = "dpo"\ntruncation_mode = "keep_end"',
            "truncation_mode",
            "needs one of keep_sta",
        ),
        ('method = "kto"\nloss_type = "sigmoid"', "loss_type", "needs one of kto, apo_zero_unpair"),
        (
            'method = "kto"\nper_device_train_batch_size = 1',
            "per_device_train_batch_size",
            "2 or m",
        ),
        (
            'method = "kto"\ntrain_sampling_strategy = "random"',
            "train_sampling_strategy",
            'needs "sequential"',
        ),
    ],
)
def test_a_key_that_the_method_cannot_do_is_one_line(tmp_path: Path, lines: str, key, words):
    (problem,) = problems_of(_recipe(tmp_path, lines))
    assert problem.startswith(f"train.{key}"), problem
    assert words in problem


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('method = "kto"', '"kto" pairs each prompt with another row'),
        ('method = "dpo"\nloss_type = ["sigmoid", "sft"]', '"sft" is a mean over the tokens'),
        ('method = "dpo"\nloss_type = "aot"', '"aot" sorts the pairs of a whole batch'),
    ],
)
def test_a_loss_of_a_whole_batch_needs_one_data_rank(tmp_path: Path, lines: str, words: str):
    path = _recipe(tmp_path, lines)
    read_recipe(path)
    (problem,) = problems_of(path, "parallel.fsdp_size=2")
    assert words in problem
    assert "of which each of 2 data ranks sees a part" in problem


@pytest.mark.parametrize(
    "lines",
    ['method = "sft"', 'method = "dpo"\nloss_type = "ipo"', 'method = "kto"\nbeta = 0.2',
     'method = "dpo"\nloss_type = ["sigmoid", "sft"]\nloss_weights = [1.0, 0.2]',
     'method = "dpo"\nloss_type = "robust"\nlabel_smoothing = 0.1',
     'method = "kto"\nloss_type = "apo_zero_unpaired"\ntrain_sampling_strategy = "random"'],
)  # fmt: skip
def test_what_a_method_can_do_is_kept_as_given(tmp_path: Path, lines: str):
    recipe = read_recipe(_recipe(tmp_path, lines))
    assert recipe.method in METHODS
    assert f'method = "{recipe.method}"' in recipe.to_toml()
    assert recipe.method == recipe.train["method"]


def test_a_recipe_without_a_method_trains_as_before(tmp_path: Path):
    recipe = read_recipe(write_recipe(tmp_path))
    assert recipe.method == "sft"
    assert "method" not in recipe.train


def test_what_the_assistant_says_is_a_matter_of_sft(tmp_path: Path):
    (problem,) = problems_of(_recipe(tmp_path, 'method = "dpo"', data="assistant_only_loss = true"))
    assert 'data.assistant_only_loss = true (line 9): is of method = "sft"' in problem


BEST = 'load_best_model_at_end = true\nsave_strategy = "epoch"'
EVAL = 'eval = "rows.jsonl"'


@pytest.mark.parametrize(
    ("lines", "data", "words"),
    [
        ("load_best_model_at_end = true", EVAL, "needs checkpoints to choose from"),
        (BEST, "", "follows what an evaluation says; give data.eval"),
        (
            BEST + '\neval_strategy = "steps"',
            EVAL,
            'save_strategy is "epoch", eval_strategy "steps"',
        ),
        (
            BEST.replace("epoch", "steps")
            + '\neval_strategy = "steps"\neval_steps = 4\nsave_steps = 6',
            EVAL,
            "needs to be a multiple of eval_steps",
        ),
        (BEST + '\nmetric_for_best_model = "token_accuracy"', EVAL, "did you mean mean_token_acc"),
        (BEST + '\nmetric_for_best_model = "rewards/margins"', EVAL, "needs one of loss, mean_tok"),
        ('metric_for_best_model = "loss"', EVAL, "is read for load_best_model_at_end"),
        ('save_strategy = "best"', EVAL, "needs metric_for_best_model"),
        ("early_stopping_patience = 0", EVAL, "needs 1 or more"),
        ("early_stopping_patience = 2", "", "follows what an evaluation says"),
        ("early_stopping_threshold = 0.1", EVAL, "no effect without early_stopping_patience"),
    ],
)
def test_the_best_one_needs_what_it_is_chosen_by(tmp_path: Path, lines: str, data: str, words: str):
    (problem,) = problems_of(_recipe(tmp_path, lines, data=data))
    assert words in problem


@pytest.mark.parametrize(
    "lines",
    [BEST, BEST + '\nmetric_for_best_model = "eval_entropy"\ngreater_is_better = false',
     'save_strategy = "best"\nmetric_for_best_model = "loss"\nload_best_model_at_end = true',
     'method = "dpo"\n' + BEST + '\nmetric_for_best_model = "rewards/accuracies"'],
)  # fmt: skip
def test_the_best_one_can_be_asked_for(tmp_path: Path, lines: str):
    read_recipe(_recipe(tmp_path, lines, data=EVAL))


def test_stopping_early_goes_by_the_loss(tmp_path: Path):
    recipe = read_recipe(_recipe(tmp_path, "early_stopping_patience = 2", data=EVAL))
    assert recipe.train["metric_for_best_model"] == "loss"
