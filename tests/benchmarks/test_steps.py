"""The benchmarks of steps run at toy size, and count what they say they count."""

import sys

import pytest
from transformers import AutoConfig

from tests.benchmarks.growth.measure import CHANGES, bytes_of, fit_line, measure
from tests.benchmarks.steps.measure import Work, compare, summary
from tests.rehearsal.models import write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("steps") / "llama", **CHANGES)


@pytest.mark.slow
@pytest.mark.world
def test_implementations_step_in_turn_on_the_same_work(path):
    work = Work(path, 2, length=16)
    records = compare(work, ["tplora", "plain", "dtensor"], stock=None, num_repeats=2)
    found = summary(records, "tplora")
    assert len(records) == 6
    assert found["plain"]["collectives"] == 0
    assert found["tplora"]["collectives"] < found["dtensor"]["collectives"]
    assert found["tplora"]["held_bytes"] == found["dtensor"]["held_bytes"]
    assert found["tplora"]["tplora / this"] == 1


@pytest.mark.slow
@pytest.mark.world
@pytest.mark.parametrize("changes", [{"tp_size": 3}, {"r": 32}, {"length": 48}], ids=str)
def test_bytes_grow_as_the_formula_says(path, changes):
    work = Work(**{"path": path, "tp_size": 2, "length": 16} | changes)
    found = measure(work, sys.executable, num_repeats=1)
    assert found["bytes"] == bytes_of(work, AutoConfig.from_pretrained(path))


def test_a_line_is_fitted_and_says_how_far_it_is_off():
    start, slope, worst = fit_line([1, 2, 4], [5, 7, 11])
    assert (start, slope, worst) == pytest.approx((3, 2, 0))
    assert fit_line([1, 2, 3], [1, 2, 4])[2] > 0.05
