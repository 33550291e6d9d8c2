"""A conversation as the chat template renders it, and where in it the assistant speaks.

What an assistant turn supervises is the difference between two renderings: of the chat up to the
turn, with the generation prompt, which is what the model is given when it has to answer; and of the
chat through the turn. That holds the answer, the token that ends the turn (without it a model never
learns to stop) and the newline some templates put after it, as in trl's own training templates. No
generation markers are needed in the template; where it has them the result is the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from tplora.errors import DataError

__all__ = ["Chat"]

Span = tuple[int, int]


class Chat:
    """Messages, their rendered text and tokens, and the tokens of each assistant turn.

    The text is tokenised once, as a whole. A token belongs to a turn if a character of it does, as
    in transformers' own assistant masks: so a blank that merges with the one before it is learned.

    Args:
        messages: Each with a role and a content.
        tokenizer: With a chat template, and fast where turns are asked for.
        options: What else the template is given: tools and its own keywords.

    Raises:
        DataError: If the template cannot render them.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any],
    ) -> None:
        self._messages = list(messages)
        self._tokenizer = tokenizer
        self._options = options
        self._text = self._rendered(len(self._messages))
        # The text holds the special tokens already: adding them again would double the first.
        encoded = tokenizer(
            self._text,
            add_special_tokens=False,
            return_offsets_mapping=tokenizer.is_fast,
            verbose=False,
        )
        self.ids: list[int] = list(encoded["input_ids"])
        self._offsets: Sequence[Span] = encoded.get("offset_mapping", ())

    def turns(self) -> list[Span]:
        """Return which tokens each assistant turn supervises, as start and end.

        Raises:
            DataError: If they cannot be told from the rest, or no token ends a turn.
        """
        return [
            self._tokens_within(self.start_of(i), self._end_of(i))
            for i, message in enumerate(self._messages)
            if message["role"] == "assistant"
        ]

    def tokens_from(self, i: int) -> Span:
        """Return the tokens from where the model starts to answer with message `i` to the end."""
        return self._tokens_within(self.start_of(i), len(self._text))

    def start_of(self, i: int) -> int:
        """Return the character at which the model starts to answer with message `i`."""
        if i == 0:
            raise DataError(
                "starts with the assistant, which has nothing to answer; put a user or system "
                "message before it"
            )
        before = self._rendered(i, add_generation_prompt=True)
        if not self._text.startswith(before):
            raise self._differs(i, before, "the chat before it")
        return len(before)

    def _end_of(self, i: int) -> int:
        through = self._rendered(i + 1)
        specials = {str(token) for token in self._tokenizer.added_tokens_decoder.values()}
        # Some templates close the whole chat with a special token; that is not part of the turn.
        closings = ["", *(token for token in specials if through.endswith(token))]
        ends = [through.removesuffix(closing) for closing in closings]
        within = [end for end in ends if self._text.startswith(end)]
        if not within:
            raise self._differs(i, through, "the turn itself")
        turn = max(within, key=len)
        if not any(turn.rstrip().endswith(token) for token in specials):
            raise DataError(
                f"message {i} (assistant): the chat template ends it with no special token, so the "
                "model would not learn to stop; use a template that ends each turn with one, or "
                "set data.assistant_only_loss = false"
            )
        return len(turn)

    def _tokens_within(self, start: int, end: int) -> Span:
        if not self._tokenizer.is_fast:
            raise DataError(
                "the tokenizer does not say which characters a token stands for; use a fast one, "
                "or set data.assistant_only_loss = false"
            )
        # Some tokenizers trim blanks off their offsets: a blank token is then empty, at its end.
        inside = [
            k
            for k, (first, last) in enumerate(self._offsets)
            if last > start and (first < end or last == end)
        ]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)

    def _differs(self, i: int, rendered: str, what: str) -> DataError:
        pairs = enumerate(zip(rendered, self._text, strict=False))
        k = next((k for k, (a, b) in pairs if a != b), min(len(rendered), len(self._text)))
        alone, within = (text[max(0, k - 12) : k + 12] for text in (rendered, self._text))
        return DataError(
            f"message {i} (assistant): the chat template renders {what} as {alone!r} when the chat "
            f"ends there, and as {within!r} when it goes on, so what the assistant said cannot be "
            "told from the rest; keep one answer per row, use another template, or set "
            "data.assistant_only_loss = false"
        )

    def _rendered(self, num_messages: int, *, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    self._messages[:num_messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._options,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(f"the chat template cannot render it: {error}") from None
