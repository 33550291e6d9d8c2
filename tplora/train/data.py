"""Rows to the tokens that trl's trainers train on, and their counts.

SFT: trl takes a ``labels`` column as it is (``dataset_kwargs={"skip_prepare_dataset": True}``) and
pads it with -100, so the loss is taken over exactly the tokens counted here. Mask columns would be
ignored by its collator, and its own assistant mask needs a chat template with generation markers.
DPO and KTO: prompt and answers under the names that trl's own preparation would give them.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from datasets import Dataset
from datasets.table import InMemoryTable
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from tplora.errors import DataError
from tplora.train.answers import AnsweredTokens, answered_tokens
from tplora.train.row_form import FORMS, RowForm, check_row, is_empty, row_form
from tplora.train.tokens import RowTokens, Supervision, row_tokens

__all__ = ["TokenizedRows", "check_enough_rows", "tokenize_rows"]

_CHUNK_ROWS = 1000
_NUM_NAMED = 3
"""Dropped rows of each kind that are named."""
_WHY = {
    "empty": "empty",
    "unsupervised": "without a supervised token{within}",
    "equal": "with two equal answers{within}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedRows:
    """Rows ready to train on, and what became of those that were read."""

    dataset: Dataset
    """Columns ``input_ids`` and ``labels``, or prompt and answers; in memory, in the order read."""
    key: str
    """The recipe key that the rows come from."""
    form: RowForm
    """The form all rows have."""
    unused_columns: tuple[str, ...]
    """Columns that were read and ignored."""
    max_length: int | None
    """Tokens a sequence was cut to, from the right."""
    num_rows: int
    """Rows in `dataset`."""
    dropped: Mapping[str, tuple[int, ...]]
    """The numbers of rows left out: "empty", which hold nothing; "unsupervised", of which no token
    is learned, cut or not; "equal", with two answers that are one, cut or not."""
    num_truncated: int
    """Rows in `dataset` that lost tokens to `max_length`."""
    num_tokens: int
    """Tokens in `dataset`."""
    num_supervised_tokens: int
    """Tokens the loss is taken over in one pass through `dataset`."""
    digest: str
    """A hash of every id and label; equal on two ranks if and only if their rows are."""

    @property
    def num_dropped(self) -> int:
        """Rows read that are not in `dataset`."""
        return sum(map(len, self.dropped.values()))

    def summary(self) -> str:
        """Say in a line or two what is trained on and what is not."""
        share = self.num_supervised_tokens / self.num_tokens
        lines = [
            f"{self.key}: {self.num_rows:,} rows ({self.form}), {self.num_tokens:,} tokens, "
            f"{self.num_supervised_tokens:,} of them supervised ({share:.1%})"
        ]
        notes = [
            (self.num_truncated, f"{self.num_truncated:,} cut to {self.max_length} tokens"),
            (self.num_dropped, f"{self.num_dropped:,} dropped: {self._dropped()}"),
            (self.unused_columns, f"columns not used: {', '.join(self.unused_columns)}"),
        ]
        lines += ["  " + "; ".join(note for count, note in notes if count)]
        return "\n".join(line for line in lines if line.strip())

    def _dropped(self) -> str:
        return _say_dropped(self.dropped, self.max_length)


def tokenize_rows(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    assistant_only_loss: bool,
    key: str,
    completion_only_loss: bool = True,
    method: str = "sft",
    console: Console | None = None,
) -> TokenizedRows:
    """Tokenise all rows, alike on every rank: in order, in this process, without cache files.

    Args:
        dataset: Rows of one form (see `RowForm`).
        tokenizer: The model's, with its chat template where rows are messages.
        max_length: Tokens kept of each sequence, from the left; None keeps all.
        assistant_only_loss: Learn only what the assistant says. Rows of prompt and completion
            texts: only the completion.
        key: The recipe key, for messages.
        completion_only_loss: For rows of prompt and completion: learn only the completion.
        method: What they are for; it decides which forms there are.
        console: Where to show a bar, if that is a terminal; None shows none.

    Raises:
        DataError: If the rows have no one form, a row is malformed, the tokenizer lacks what the
            form needs, or no row is left.
    """
    form = row_form(dataset.column_names, key=key, method=method)
    _check_tokenizer(dataset, form, tokenizer, key=key)
    if form is RowForm.TEXT and assistant_only_loss:
        raise DataError(
            f"{key}: rows of text have no assistant; set data.assistant_only_loss = false, or give "
            "rows with messages"
        )
    supervision = Supervision(
        assistant_only=assistant_only_loss, completion_only=completion_only_loss
    )
    used = [*form.columns, *(name for name in form.optional_columns if name in dataset.features)]
    rows = _shown(dataset.select_columns(used), console, key=key)
    builder = _Builder(max_length)
    for number, row in enumerate(rows, start=1):
        try:
            check_row(row, form)
            tokens = None if is_empty(row, form) else _tokens_of(row, form, tokenizer, supervision)
            builder.add(number, tokens)
        except DataError as error:
            raise DataError(f"{key}: row {number}: {error}") from None
    return builder.finished(
        key=key, form=form, unused=tuple(n for n in dataset.column_names if n not in used)
    )


def _tokens_of(
    row: Mapping[str, Any],
    form: RowForm,
    tokenizer: PreTrainedTokenizerBase,
    supervision: Supervision,
) -> RowTokens | AnsweredTokens:
    if form in FORMS["sft"]:
        return row_tokens(row, form, tokenizer, supervision)
    return answered_tokens(row, form, tokenizer)


def check_enough_rows(num_rows: int, *, rows_per_step: int, key: str, unit: str = "rows") -> None:
    """Check that the rows fill at least one optimizer step.

    Args:
        num_rows: Rows there are to train on.
        rows_per_step: The global batch: rows per device, times accumulation, times data ranks.
        key: The recipe key, for the message.
        unit: What is counted, rows or packs of them.

    Raises:
        DataError: If they do not.
    """
    if num_rows < rows_per_step:
        raise DataError(
            f"{key}: {num_rows} {unit}, but one step takes {rows_per_step}; give more rows, or "
            "lower train.per_device_train_batch_size or train.gradient_accumulation_steps"
        )


class _Builder:
    """Token rows collected as compact arrays, counted and hashed on the way."""

    def __init__(self, max_length: int | None) -> None:
        self._max_length = max_length
        self._chunk: list[RowTokens | AnsweredTokens] = []
        self._batches: list[pa.RecordBatch] = []
        self._hash = hashlib.sha256()
        self._counts: Counter[str] = Counter()
        self._dropped: dict[str, list[int]] = {why: [] for why in _WHY}

    def add(self, number: int, tokens: RowTokens | AnsweredTokens | None) -> None:
        """Take one row, or None for an empty one."""
        if tokens is None or not tokens.num_tokens:
            self._dropped["empty"].append(number)
            return
        kept = tokens.cut(self._max_length)
        if kept.useless:
            self._dropped[kept.useless].append(number)
            return
        self._counts["rows"] += 1
        self._counts["truncated"] += kept.num_tokens < tokens.num_tokens
        self._counts["tokens"] += kept.num_tokens
        self._counts["supervised"] += kept.num_supervised
        self._chunk.append(kept)
        if len(self._chunk) == _CHUNK_ROWS:
            self._flush()

    def finished(self, *, key: str, form: RowForm, unused: tuple[str, ...]) -> TokenizedRows:
        """Return what was collected."""
        counts = self._counts
        if not counts["rows"]:
            raise DataError(
                f"{key}: no row is left to train on: "
                f"{_say_dropped(self._dropped, self._max_length)}"
                f"{'; raise train.max_length' if self._max_length else ''}"
            )
        if self._chunk:
            self._flush()
        table = pa.Table.from_batches(self._batches)
        digest = self._hash.hexdigest()
        return TokenizedRows(
            dataset=Dataset(InMemoryTable(table), fingerprint=digest[:16]),
            key=key,
            form=form,
            unused_columns=unused,
            max_length=self._max_length,
            num_rows=counts["rows"],
            dropped={why: tuple(numbers) for why, numbers in self._dropped.items()},
            num_truncated=counts["truncated"],
            num_tokens=counts["tokens"],
            num_supervised_tokens=counts["supervised"],
            digest=digest,
        )

    def _flush(self) -> None:
        for row in self._chunk:
            self._hash.update(array("q", row.numbers()))
        rows = [row.columns for row in self._chunk]
        columns = {
            name: pa.array([row[name] for row in rows], type=_type_of(value))
            for name, value in rows[0].items()
        }
        self._batches.append(pa.RecordBatch.from_pydict(columns))
        self._chunk = []


def _type_of(value: object) -> pa.DataType:
    return pa.bool_() if isinstance(value, bool) else pa.list_(pa.int32())


def _check_tokenizer(
    dataset: Dataset, form: RowForm, tokenizer: PreTrainedTokenizerBase, *, key: str
) -> None:
    is_chat = form is RowForm.MESSAGES or isinstance(dataset[0][form.columns[0]], list)
    if is_chat and not tokenizer.chat_template:
        raise DataError(
            f"{key}: rows are messages, but the tokenizer has no chat template; take the model's "
            "instruction-tuned version, or give rows of prompt and completion, or text"
        )
    if not is_chat and tokenizer.eos_token is None:
        raise DataError(
            f"{key}: rows of {form} end with the end-of-text token, but the tokenizer has no "
            "eos_token; set one in its tokenizer_config.json"
        )


def _shown(
    rows: Iterable[Mapping[str, Any]], console: Console | None, *, key: str
) -> Iterator[Mapping[str, Any]]:
    if console is None or not console.is_terminal:
        return iter(rows)
    return iter(track(rows, f"tokenising {key}", console=console, transient=True))


def _say_dropped(dropped: Mapping[str, Sequence[int]], max_length: int | None) -> str:
    """How many of each kind, and which: ``2 empty (rows 3, 7)``."""
    parts = []
    for why, numbers in dropped.items():
        if numbers:
            said = _WHY[why].format(within=_within(max_length))
            more = ", ..." if len(numbers) > _NUM_NAMED else ""
            named = ", ".join(f"{number:,}" for number in numbers[:_NUM_NAMED]) + more
            parts.append(f"{len(numbers):,} {said} (row{'s' * (len(numbers) > 1)} {named})")
    return ", ".join(parts)


def _within(max_length: int | None) -> str:
    return "" if max_length is None else f" in its first {max_length}"
