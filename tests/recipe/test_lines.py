import tomllib

from tplora.recipe.lines import find_lines

TEXT = '''\
top = 1

[a]  # the [first] table
x = [
  1,  # y = 2
  2,
]
text = """
z = 3
[b]
"""
y = { inner = 5 }
b.c = 6
"quoted key" = 7

[a.deeper]
x = 8
'''


def test_every_key_has_the_line_its_statement_starts_on() -> None:
    assert find_lines(TEXT) == {
        ("top",): 1,
        ("a",): 3,
        ("a", "x"): 4,
        ("a", "text"): 8,
        ("a", "y"): 12,
        ("a", "y", "inner"): 12,
        ("a", "b"): 13,
        ("a", "b", "c"): 13,
        ("a", "quoted key"): 14,
        ("a", "deeper"): 16,
        ("a", "deeper", "x"): 17,
    }


def test_a_key_inside_a_string_is_no_key() -> None:
    assert ("a", "z") not in find_lines(TEXT)
    assert ("b",) not in find_lines(TEXT)


def test_windows_line_ends_and_arrays_of_tables_are_read() -> None:
    text = "[[t]]\r\nx = 1\r\n[[t]]\r\nx = 2\r\n"
    assert tomllib.loads(text) == {"t": [{"x": 1}, {"x": 2}]}
    assert find_lines(text) == {("t",): 1, ("t", "x"): 2}
