"""What fits a GPU: the fewest processes, and the most rows of a micro-batch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.rehearsal.models import write_model
from tplora.cli import app
from tplora.errors import PlanError
from tplora.plan.axes import Axes
from tplora.recipe.check import read_recipe
from tplora.run.fit import RESERVED, find_fit, largest
from tplora.run.predict import planned_batch, predict_step
from tplora.run.preflight import plan_recipe


@pytest.mark.parametrize("most", [1, 2, 3, 17, 1000])
def test_the_largest_number_that_fits_is_found_along_a_line(most):
    asked = []

    def peak(n):
        asked.append(n)
        return 100 + 7 * n

    assert largest(peak, 100 + 7 * most) == most
    assert len(set(asked)) <= 5, "each is a step that is run through"


def test_the_largest_number_is_found_where_the_line_bends():
    assert largest(lambda n: 10 * n + (90 if n > 6 else 0), 100) == 6
    assert largest(lambda n: n * n, 200) == 14
    assert largest(lambda n: 11, 10) == 0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    model = write_model("llama", folder / "llama")
    text = (
        f'[model]\npretrained_model_name_or_path = "{model}"\n[parallel]\ntp_size = 2\n'
        '[lora]\nr = 8\ntarget_modules = "all-linear"\n[data]\ntrain = "rows.jsonl"\n'
        "[train]\nper_device_train_batch_size = 4\nmax_length = 64\nmax_steps = 1\n"
        "activation_checkpointing = false\n"
    )
    (folder / "rows.jsonl").write_text('{"text": "one"}\n')
    (folder / "fit.toml").write_text(text)
    return read_recipe(folder / "fit.toml", [])


def _peak(recipe, tp_size, rows):
    return predict_step(recipe, plan_recipe(recipe, tp_size=tp_size), rows=rows).peak


def test_the_fewest_processes_and_most_rows_are_those_of_steps_run_through(recipe):
    memory = int(_peak(recipe, 2, 5) / (1 - RESERVED)) + 8
    said = []
    fit = find_fit(recipe, Axes(tp_size=2), memory, progress=said.append)
    assert fit.smallest == Axes(tp_size=2), "4 rows on one process take more than 5 on two"
    assert fit.largest_rows == 5
    assert fit.largest_peak == _peak(recipe, 2, 5)
    assert "tp_size 2" in dict(fit.facts())["fits"]
    assert len(said) == len(set(said))


def test_nothing_fits_into_too_little(recipe):
    fit = find_fit(recipe, Axes(tp_size=2), 1 << 20, progress=lambda message: None)
    assert (fit.smallest, fit.largest_rows) == (None, 0)
    assert "none up to 64 processes" in dict(fit.facts())["fits"]


def test_a_recipe_says_its_micro_batch():
    train = {"max_length": 128, "gradient_accumulation_steps": 2}
    recipe = SimpleNamespace(train=train, method="sft")
    batch = planned_batch(recipe)
    assert (batch.rows, batch.length) == (8, 128)
    assert batch.is_checkpointed
    assert batch.is_accumulated
    assert not batch.is_joined
    assert not batch.reference_passes


@pytest.mark.parametrize(
    ("method", "changes", "sequences", "passes"),
    [
        ("dpo", {}, 16, (0, 1)),
        ("kto", {}, 8, (1, 2)),
        ("kto", {"loss_type": "apo_zero_unpaired"}, 8, (0, 1)),
    ],
)
def test_a_recipe_says_what_preferences_are_compared_with(method, changes, sequences, passes):
    batch = planned_batch(SimpleNamespace(train=changes, method=method))
    assert batch.rows == sequences
    assert (batch.passes_before, batch.reference_passes) == passes


def test_joined_rows_and_preferences_are_run_through_and_autocast_is_not(recipe):
    for train in ({"packing": True}, {"method": "dpo"}, {"bf16": True}):
        changed = replace(recipe, train=recipe.train | train)
        plan = plan_recipe(changed, tp_size=2)
        if "bf16" in train:
            with pytest.raises(PlanError, match="what autocast casts is known on a device alone"):
                predict_step(changed, plan)
            continue
        cost = predict_step(changed, plan)
        assert cost.peak > predict_step(recipe, plan).peak, train


def _plan(recipe, *argv):
    return CliRunner().invoke(app, ["plan", str(recipe.path), *argv])


def test_the_command_says_memory_bytes_and_what_fits(recipe):
    shown = _plan(recipe, "--gpu-memory", "1GiB")
    assert shown.exit_code == 0, shown.output
    for name in ("memory per rank", "bytes and collectives", "fits", "largest micro-batch"):
        assert name in shown.output


def test_the_command_refuses_a_size_before_anything_is_run_through(recipe):
    error = _plan(recipe, "--gpu-memory", "much").exception
    assert isinstance(error, PlanError)
    assert "--gpu-memory = 'much': is no size" in str(error)


def test_a_step_that_cannot_be_run_through_leaves_the_plan(recipe, monkeypatch):
    def fails(*args, **kwargs):
        raise PlanError(["LlamaForCausalLM: its step cannot be followed without values (no)"])

    monkeypatch.setattr("tplora.run.predict.rehearse", fails)
    shown = _plan(recipe)
    assert shown.exit_code == 0
    assert "not predicted: LlamaForCausalLM" in " ".join(shown.output.split())
    assert "bytes per rank" in shown.output
    assert isinstance(_plan(recipe, "--gpu-memory", "1GiB").exception, PlanError)
