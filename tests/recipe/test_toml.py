import math
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplora.recipe.toml import dump_toml, dump_value

# Surrogates are no characters, so they are in no file.
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.datetimes().map(lambda value: value.replace(fold=0))  # TOML knows no fold
    | st.dates()
    | st.times().map(lambda value: value.replace(fold=0))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(TEXT, st.dictionaries(TEXT, VALUES, max_size=4), max_size=4)


@settings(deadline=None)
@given(TABLES)
def test_what_is_written_is_read_back_with_the_same_values_and_types(tables: dict) -> None:
    read = tomllib.loads(dump_toml(tables))
    assert read == tables
    assert repr(read) == repr(tables)  # 1, 1.0 and True are equal, but not alike


def test_a_number_that_is_none_is_written_as_nan() -> None:
    assert math.isnan(tomllib.loads(f"x = {dump_value(math.nan)}")["x"])


def test_none_is_refused_rather_than_left_out() -> None:
    with pytest.raises(TypeError, match="TOML has no NoneType"):
        dump_value({"x": None})
