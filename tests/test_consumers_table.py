"""The page of consumers is what the table of rules says."""

from tests.consumers_table import PAGE, page_text


def test_the_page_is_what_the_rules_say():
    assert PAGE.read_text(encoding="utf-8") == page_text()
