"""Sizes as people write them."""

import pytest

from tplora.errors import PlanError
from tplora.plan.size import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("24g", 24 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("7B", 7),
    ],
)
def test_a_size_is_read_with_its_unit(text, num_bytes):
    assert parse_size(text, where="--gpu-memory") == num_bytes


@pytest.mark.parametrize("text", ["", "80", "GiB", "eighty GiB", "-1GiB", "0GiB", "80 GiBit"])
def test_what_is_no_size_is_refused_with_what_would_be(text):
    with pytest.raises(PlanError, match=r"--gpu-memory.*write it as 80GiB"):
        parse_size(text, where="--gpu-memory")


def test_a_size_is_written_in_the_largest_unit_that_has_one_of_it():
    assert [format_size(n) for n in (3, 2048, 3 * 2**29)] == ["3 B", "2.0 KiB", "1.5 GiB"]
