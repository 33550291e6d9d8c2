"""One row to token ids and labels.

A label is the token's own id where the model is trained to say it, else -100. Labels are shifted
inside the loss, so the first token of a row is never predicted: it is never counted either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tplora.train.chat import Chat
from tplora.train.row_form import RowForm

__all__ = [
    "IGNORED",
    "RowTokens",
    "Supervision",
    "num_common",
    "row_tokens",
    "template_options",
    "text_ids",
]

IGNORED = -100
"""The label of a token that the loss leaves out; torch's and transformers' own number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTokens:
    """The tokens of a row and what is learned of them, of one length."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_supervised(self) -> int:
        """How many tokens the loss is taken over."""
        return sum(label != IGNORED for label in self.labels)

    @property
    def columns(self) -> dict[str, list[int]]:
        """The row as it is trained on."""
        return {"input_ids": self.input_ids, "labels": self.labels}

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return len(self.input_ids)

    @property
    def useless(self) -> str | None:
        """Why nothing can be learned from the row, or None."""
        return None if self.num_supervised else "unsupervised"

    def numbers(self) -> list[int]:
        """Every id and label, for a hash."""
        return [len(self.input_ids), *self.input_ids, *self.labels]

    def cut(self, max_length: int | None) -> "RowTokens":
        """Keep the first `max_length` tokens."""
        return RowTokens(input_ids=self.input_ids[:max_length], labels=self.labels[:max_length])


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Which tokens are learned."""

    assistant_only: bool
    """Of messages, only what the assistant says."""
    completion_only: bool
    """Of prompt and completion, only the completion."""


def row_tokens(
    row: Mapping[str, Any],
    form: RowForm,
    tokenizer: PreTrainedTokenizerBase,
    supervision: Supervision,
) -> RowTokens:
    """Tokenise one row that `check_row` has let through.

    Raises:
        DataError: If the chat template cannot render it, or what the assistant said cannot be told
            from the rest.
    """
    options = template_options(row)
    if form is RowForm.TEXT:
        ids = text_ids(row["text"], tokenizer, ends=True)
        return _labelled(ids, [(0, len(ids))])
    if form is RowForm.MESSAGES:
        chat = Chat(row["messages"], tokenizer, options)
        return _labelled(
            chat.ids, chat.turns() if supervision.assistant_only else [(0, len(chat.ids))]
        )
    if isinstance(row["prompt"], str):
        return _text_completion(row["prompt"], row["completion"], tokenizer, supervision)
    return _chat_completion(
        Chat(row["prompt"] + row["completion"], tokenizer, options),
        supervision,
        num_prompt=len(row["prompt"]),
    )


def _chat_completion(chat: Chat, supervision: Supervision, *, num_prompt: int) -> RowTokens:
    spans = chat.turns() if supervision.assistant_only else [(0, len(chat.ids))]
    start = chat.tokens_from(num_prompt)[0] if supervision.completion_only else 0
    return _labelled(chat.ids, [(max(start, first), last) for first, last in spans])


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """What else a row gives the chat template."""
    options = dict(row.get("chat_template_kwargs") or {})
    if row.get("tools"):
        options["tools"] = row["tools"]
    return options


def _text_completion(
    prompt: str, completion: str, tokenizer: PreTrainedTokenizerBase, supervision: Supervision
) -> RowTokens:
    ids = text_ids(prompt + completion, tokenizer, ends=True)
    if not (supervision.completion_only or supervision.assistant_only):
        return _labelled(ids, [(0, len(ids))])
    # A token may straddle the border; it holds the completion's first characters, so it is learned.
    start = num_common(text_ids(prompt, tokenizer, ends=False), ids)
    return _labelled(ids, [(start, len(ids))])


def text_ids(text: str, tokenizer: PreTrainedTokenizerBase, *, ends: bool) -> list[int]:
    """Tokens of a text, special ones as the tokenizer adds them; at its end one end, if any."""
    if ends and not text.endswith(tokenizer.eos_token):
        text += tokenizer.eos_token
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    if ends and ids[-2:] == [tokenizer.eos_token_id] * 2:  # the tokenizer adds its own
        ids.pop()
    return ids


def _labelled(ids: list[int], spans: Sequence[tuple[int, int]]) -> RowTokens:
    labels = [IGNORED] * len(ids)
    for start, end in spans:
        labels[start:end] = ids[start:end]
    labels[:1] = [IGNORED] * len(labels[:1])
    return RowTokens(input_ids=ids, labels=labels)


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of the first numbers are the same."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
