"""On cards: NCCL ranks give the numbers of one card, and what a rank holds is its share.

pytest -m gpu tests/test_gpu.py
"""

import pytest
import torch

from tests.run.test_finetune import metrics, place, tplora

__all__ = ["place"]  # a fixture

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cards():
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs 2 CUDA devices, this machine has {found}")
    return found


@pytest.mark.parametrize(("dtype", "rel"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_two_cards_give_the_numbers_of_one(cards, place, dtype, rel):
    runs = []
    for tp_size in (1, 2):
        folder = place / f"gpu-{dtype}-{tp_size}"
        argv = ["--output", str(folder), "--set", f"parallel.tp_size={tp_size}"]
        done = tplora(place, "finetune", "recipe.toml", *argv, "--set", f"model.dtype={dtype}")
        assert done.returncode == 0, done.stderr
        runs.append(metrics(folder))
    for one, two in zip(*runs, strict=True):
        for name in set(one) - {"tokens_per_s", "peak_bytes"}:
            assert two[name] == pytest.approx(one[name], rel=rel), (name, one, two)
