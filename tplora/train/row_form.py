"""The forms a row may have, decided once for a data set by its columns and the method."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from tplora.errors import DataError

__all__ = ["FORMS", "RowForm", "check_row", "is_empty", "row_form"]


class RowForm(StrEnum):
    """What the rows of one data set hold."""

    MESSAGES = "messages"
    """A chat: a list of messages, each with a role and a content."""
    PROMPT_COMPLETION = "prompt, completion"
    """A text (or messages) to answer, and the answer."""
    TEXT = "text"
    """A text, learned from its first token to its last."""
    PREFERENCE = "prompt, chosen, rejected"
    """Something to answer, and two answers, of which the first is the better one."""
    PREFERENCE_OF_CHATS = "chosen, rejected"
    """Two chats or texts that begin alike: the prompt is what they share."""
    RATED = "prompt, completion, label"
    """Something to answer, the answer, and whether it is wanted."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns a row of this form needs."""
        return tuple(self.split(", "))

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Further columns that a chat template is given where they are there."""
        return () if self is RowForm.TEXT else ("tools", "chat_template_kwargs")


FORMS: Mapping[str, tuple[RowForm, ...]] = {
    "sft": (RowForm.MESSAGES, RowForm.PROMPT_COMPLETION, RowForm.TEXT),
    "dpo": (RowForm.PREFERENCE, RowForm.PREFERENCE_OF_CHATS),
    "kto": (RowForm.RATED,),
}
"""What each method takes; of two forms that fit, one with all columns of the other comes first."""

# What a row would mean differently without: images are never dropped in silence.
_REFUSED = ("image", "images", "audio", "video", "videos")


def row_form(columns: Sequence[str], *, key: str, method: str = "sft") -> RowForm:
    """Decide the form from the columns.

    Raises:
        DataError: If the columns fit no form or two, or hold what this model could not be given.
    """
    refused = [name for name in _REFUSED if name in columns]
    if refused:
        raise DataError(f"{key}: has the column {', '.join(refused)}; only text can be trained on")
    forms = [form for form in FORMS[method] if set(form.columns) <= set(columns)]
    if len(forms) == 1 or (forms and set(forms[1].columns) < set(forms[0].columns)):
        return forms[0]
    found = f"{key}: has the columns {', '.join(columns)}"
    needed = _NEEDED[method]
    if forms:
        both = " as well as ".join(f"({form})" for form in forms)
        raise DataError(f"{found}, which fit {both}; keep one of {needed}")
    raise DataError(f"{found}; needed: {needed}{_other_method(columns, method)}")


_NEEDED = {
    "sft": "messages (role and content), or prompt and completion, or text",
    "dpo": "prompt, chosen and rejected, or chosen and rejected that begin alike",
    "kto": "prompt, completion and label (true where the completion is wanted)",
}


def _other_method(columns: Sequence[str], method: str) -> str:
    for other, forms in FORMS.items():
        if other != method and any(set(form.columns) <= set(columns) for form in forms):
            return f'; with train.method = "{other}" they are what is needed'
    return ""


def check_row(row: Mapping[str, Any], form: RowForm) -> None:
    """Check that a row has its form's columns, filled with the right types.

    Raises:
        DataError: If one is missing or of another type.
    """
    named = [name for name in form.columns if name != "label"]
    for name in form.columns:
        value = row[name]
        if value is None:
            raise DataError(f"{name} is missing here; every row needs {form}")
        if name == "label":
            _check_label(value)
            continue
        may_be_text = form is not RowForm.MESSAGES
        may_be_messages = form is not RowForm.TEXT
        if may_be_text and isinstance(value, str):
            continue
        if not (may_be_messages and isinstance(value, list)):
            needed = ["a text"] * may_be_text + ["a list of messages"] * may_be_messages
            raise DataError(f"{name} is a {type(value).__name__}; needed: {' or '.join(needed)}")
        _check_messages(value, name)
    if len({isinstance(row[name], str) for name in named}) > 1:
        both = "both" if len(named) == 2 else "all"
        listed = f"{', '.join(named[:-1])} and {named[-1]}"
        raise DataError(f"{listed} have to be {both} texts or {both} lists of messages")


def is_empty(row: Mapping[str, Any], form: RowForm) -> bool:
    """Whether a column that is needed holds nothing; an empty prompt still has its completion."""
    answers = [name for name in form.columns if name not in ("prompt", "label")]
    return not all(row[name] for name in answers)


def _check_label(value: object) -> None:
    if value not in (True, False):
        raise DataError(f"label is {value!r}; needed: true or false")


def _check_messages(messages: Sequence[object], name: str) -> None:
    for number, message in enumerate(messages):
        where = f"{name}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{where} has no role; needed: role and content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(f"{where} has no content; needed: role and content")
