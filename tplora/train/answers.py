"""One row with answers to compare, or one that is rated, to token ids: a prompt and what follows.

An answer begins where the model would begin to answer, and is learned to its end, the token that
ends the turn included. Two answers of a pair share their prompt token by token: where a token
straddles the border, the prompt ends before it, in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl import extract_prompt

from tplora.errors import DataError
from tplora.train.chat import Chat
from tplora.train.row_form import RowForm
from tplora.train.tokens import num_common, template_options, text_ids

__all__ = ["AnsweredTokens", "answered_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredTokens:
    """A prompt's tokens and those of each answer, under the names that trl's trainers read."""

    prompt_ids: list[int]
    answers: dict[str, list[int]]
    """By column: ``chosen_ids`` and ``rejected_ids``, or ``completion_ids``."""
    label: bool | None = None
    """Whether the answer is wanted; None of a pair."""

    @property
    def columns(self) -> dict[str, Any]:
        """The row as it is trained on."""
        label = {} if self.label is None else {"label": self.label}
        return {"prompt_ids": self.prompt_ids, **self.answers, **label}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences; the prompt is part of each."""
        return len(self.prompt_ids) * len(self.answers) + self.num_supervised

    @property
    def num_supervised(self) -> int:
        """Tokens of the answers."""
        return sum(map(len, self.answers.values()))

    @property
    def useless(self) -> str | None:
        """Why nothing can be learned from the row, or None."""
        if not all(self.answers.values()):
            return "unsupervised"
        first, *others = self.answers.values()
        return "equal" if first in others else None

    def numbers(self) -> list[int]:
        """Every id and label, for a hash."""
        parts = [self.prompt_ids, *self.answers.values()]
        return [-1 if self.label is None else int(self.label), *(n for p in parts for n in p)]

    def cut(self, max_length: int | None) -> "AnsweredTokens":
        """Keep the first ``max_length`` tokens of each sequence."""
        if max_length is None:
            return self
        room = max(max_length - len(self.prompt_ids), 0)
        return AnsweredTokens(
            prompt_ids=self.prompt_ids[:max_length],
            answers={name: ids[:room] for name, ids in self.answers.items()},
            label=self.label,
        )


def answered_tokens(
    row: Mapping[str, Any], form: RowForm, tokenizer: PreTrainedTokenizerBase
) -> AnsweredTokens:
    """Tokenise one row that `check_row` has let through.

    Raises:
        DataError: If the chat template cannot render it, or where an answer begins cannot be told.
    """
    if form is RowForm.PREFERENCE_OF_CHATS:
        row = {**row, **extract_prompt({name: row[name] for name in form.columns})}
    label = bool(row["label"]) if form is RowForm.RATED else None
    names = ["completion"] if form is RowForm.RATED else ["chosen", "rejected"]
    starts, wholes = zip(*(_start(row, name, tokenizer) for name in names), strict=True)
    start = min(*starts, *(num_common(wholes[0], whole) for whole in wholes))
    return AnsweredTokens(
        prompt_ids=wholes[0][:start],
        answers={f"{name}_ids": ids[start:] for name, ids in zip(names, wholes, strict=True)},
        label=label,
    )


def _start(
    row: Mapping[str, Any], name: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, Sequence[int]]:
    """Where the answer begins, and the whole sequence."""
    prompt, answer = row["prompt"], row[name]
    if isinstance(prompt, str):
        ids = text_ids(prompt + answer, tokenizer, ends=True)
        return num_common(text_ids(prompt, tokenizer, ends=False), ids), ids
    if not prompt:
        raise DataError(
            "has no message before the answers, so there is nothing to answer; give prompt, or "
            "chosen and rejected that begin alike"
        )
    chat = Chat([*prompt, *answer], tokenizer, template_options(row))
    return chat.tokens_from(len(prompt))[0], chat.ids
