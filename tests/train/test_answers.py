"""Rows of pairs and of rated answers: trl's own tokens of them, counted, and what is wrong said."""

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

from tests.train.preferences import pairs, rated
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.errors import DataError
from tplora.train.data import tokenize_rows
from tplora.train.kinds import prepare_rows
from tplora.train.preview import preview

CHAT = [
    {
        "prompt": [{"role": "user", "content": f"what is {k}?"}],
        "chosen": [{"role": "assistant", "content": f"the answer is {k}"}],
        "rejected": [{"role": "assistant", "content": "thanks" * (1 + k % 2)}],
    }
    for k in range(5)
]
BEGIN_ALIKE = [
    {name: [*row["prompt"], *row[name]] for name in ("chosen", "rejected")} for row in CHAT
]
TEXT_ALIKE = [
    {"chosen": "what is it? the answer", "rejected": "what is it? nobody knows"},
    {"chosen": "a b c", "rejected": "a b d"},
]


def tokenized(rows, *, method="dpo", max_length=None, tokenizer=None):
    return tokenize_rows(
        Dataset.from_list(rows, on_mixed_types="use_json"),
        tokenizer or tiny_tokenizer(),
        max_length=max_length,
        assistant_only_loss=False,
        method=method,
        key="data.train",
    )


PLAIN = {"use_cpu": True, "bf16": False, "activation_checkpointing": False}


class _Preparing:
    """As much of a trainer as its own preparation of rows reads."""

    def __init__(self, tokenizer):
        self._tokenizer, self.undesirable_weight, self.desirable_weight = tokenizer, 1.0, 1.0
        setattr(self, "calculate_KL", True)  # noqa: B010  (trl's name)


@pytest.mark.parametrize(
    "rows",
    [pairs(7), CHAT, BEGIN_ALIKE, TEXT_ALIKE],
    ids=["texts", "chats", "alike", "texts-alike"],
)
def test_the_tokens_of_a_pair_are_trls_own(tmp_path, rows):
    tokenizer = tiny_tokenizer()
    args = DPOConfig(output_dir=str(tmp_path), **PLAIN)
    wanted = DPOTrainer._prepare_dataset(
        _Preparing(tokenizer), Dataset.from_list(rows), tokenizer, args, "train"
    )
    found = tokenized(rows)
    names = ["prompt_ids", "chosen_ids", "rejected_ids"]
    assert found.dataset.column_names == names
    for name in names:
        assert found.dataset[name][:] == wanted[name][:], name
    answers = [ids for name in names[1:] for ids in wanted[name]]
    assert found.num_supervised_tokens == sum(map(len, answers))
    assert found.num_tokens == sum(map(len, answers)) + 2 * sum(map(len, wanted["prompt_ids"]))


@pytest.mark.parametrize("size", [2, 3])
def test_the_tokens_of_a_rated_answer_are_trls_own(tmp_path, size):
    """With the answers to other prompts, in batches of which the last one is shorter."""
    rows, tokenizer = rated(7), tiny_tokenizer()
    args = KTOConfig(output_dir=str(tmp_path), **PLAIN, per_device_train_batch_size=size)
    trainer = _Preparing(tokenizer)
    wanted = KTOTrainer._prepare_dataset(trainer, Dataset.from_list(rows), tokenizer, args, "train")
    found = prepare_rows("kto", tokenized(rows, method="kto").dataset, args)
    assert set(found.column_names) < set(wanted.column_names)
    for name in found.column_names:
        assert found[name][:] == wanted[name][:], name


def test_rows_that_say_nothing_are_dropped_counted_and_named():
    rows = [
        *pairs(2),
        {"prompt": "a", "chosen": " yes", "rejected": " yes"},
        {"prompt": "a", "chosen": " yes", "rejected": ""},
        {"prompt": "what is the answer to this question " * 4, "chosen": " a", "rejected": " b"},
        {"prompt": "a", "chosen": " yes" * 40 + "!", "rejected": " yes" * 40 + "?"},
    ]
    found = tokenized(rows, max_length=30)
    assert found.dropped == {"empty": (4,), "unsupervised": (5,), "equal": (3, 6)}
    assert (found.num_rows, found.num_dropped) == (2, 4)
    said = found.summary()
    assert "data.train: 2 rows (prompt, chosen, rejected)" in said
    assert "2 with two equal answers in its first 30 (rows 3, 6)" in said
    assert "1 without a supervised token in its first 30 (row 5)" in said
    with pytest.raises(DataError, match=r"no row is left to train on: 1 with two equal answers \("):
        tokenized(rows[2:3])


def test_the_digest_tells_the_answers_apart():
    row = pairs(1)[0]
    other = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
    assert tokenized([row]).digest != tokenized([other]).digest
    one, two = ([rated(1)[0] | {"label": label}] for label in (True, False))
    assert tokenized(one, method="kto").digest != tokenized(two, method="kto").digest


def test_a_preview_marks_the_better_answer_then_the_other():
    shown = preview(tokenized(CHAT).dataset, tiny_tokenizer())
    prompt, better, other = shown.partition("[[")[0], *shown.split("[[")[1:]
    assert prompt.endswith("<|im_start|>assistant\n")
    assert better.startswith("the answer is 0<|im_end|>")
    assert other.startswith("thanks<|im_end|>")


@pytest.mark.parametrize(
    ("rows", "method", "words"),
    [
        ([{"text": "a"}], "dpo", 'needed: prompt, chosen and rejected.*train.method = "sft"'),
        (pairs(1), "sft", 'with train.method = "dpo" they are what is needed'),
        (rated(1), "dpo", 'with train.method = "kto"|train.method = "sft"'),
        (pairs(1), "kto", r"needed: prompt, completion and label \(true where"),
        ([pairs(1)[0] | {"chosen": None}], "dpo", "row 1: chosen is missing here"),
        ([pairs(1)[0] | {"chosen": 3}], "dpo", "row 1: chosen is a int; needed: a text or a list"),
        ([CHAT[0] | {"prompt": "a"}], "dpo", "chosen and rejected have to be all texts or all li"),
        ([rated(1)[0] | {"label": "yes"}], "kto", "row 1: label is 'yes'; needed: true or false"),
        ([{"chosen": CHAT[0]["chosen"], "rejected": CHAT[0]["rejected"]}], "dpo", "no message bef"),
        ([pairs(1)[0] | {"images": ["x"]}], "dpo", "has the column images; only text"),
    ],
)
def test_rows_that_are_not_what_the_method_takes_are_refused(rows, method, words):
    with pytest.raises(DataError, match=words):
        tokenized(rows, method=method)
