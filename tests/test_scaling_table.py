"""The page of what goes over each axis is what the plan says."""

import pytest

from tests.scaling_table import PAGE, page_text


@pytest.mark.slow
def test_the_page_is_what_the_plan_says():
    """70 billion parameters among it; the small model's rows are held to real steps elsewhere."""
    assert PAGE.read_text(encoding="utf-8") == page_text()
