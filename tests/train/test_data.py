import io

import datasets
import pytest
from datasets import Dataset
from rich.console import Console
from rich.text import Text
from tokenizers import processors

from tests.train.tiny_tokenizer import CHATML, CHATML_MARKED, tiny_tokenizer
from tplora.errors import DataError
from tplora.train.data import check_enough_rows, tokenize_rows
from tplora.train.preview import preview

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "the answer\nis yes"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": " you are welcome \u2603"},
]


def _tokenized(columns, tokenizer=None, *, assistant_only_loss=True, max_length=None, **options):
    return tokenize_rows(
        Dataset.from_dict(columns, on_mixed_types="use_json"),
        tokenizer or tiny_tokenizer(),
        max_length=max_length,
        assistant_only_loss=assistant_only_loss,
        key="data.train",
        **options,
    )


def _supervised_text(rows, tokenizer, row=0):
    labels = rows.dataset[row]["labels"]
    return tokenizer.decode([label for label in labels if label != -100])


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_each_assistant_turn_is_supervised_with_its_end_of_turn_token(trim_offsets):
    tokenizer = tiny_tokenizer(trim_offsets=trim_offsets)
    rows = _tokenized({"messages": [CHAT]}, tokenizer)
    assert preview(rows.dataset, tokenizer) == (
        "<s><|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nwhat is it?<|im_end|>\n"
        "<|im_start|>assistant\n[[the answer\nis yes<|im_end|>\n]]"
        "<|im_start|>user\nthanks<|im_end|>\n"
        "<|im_start|>assistant\n[[ you are welcome \u2603<|im_end|>\n]]"
    )


def test_a_template_with_generation_markers_gives_the_same_answer_as_without():
    marked, plain = tiny_tokenizer(CHATML_MARKED), tiny_tokenizer(CHATML)
    theirs = marked.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    for tokenizer in (marked, plain):
        rows = _tokenized({"messages": [CHAT]}, tokenizer).dataset[0]
        assert rows["input_ids"] == theirs["input_ids"]
        assert [label != -100 for label in rows["labels"]] == [
            bool(bit) for bit in theirs["assistant_masks"]
        ]


def test_all_tokens_but_the_first_are_supervised_when_not_only_the_assistant_is():
    rows = _tokenized({"messages": [CHAT]}, assistant_only_loss=False)
    row = rows.dataset[0]
    assert row["labels"] == [-100, *row["input_ids"][1:]]
    assert rows.num_supervised_tokens == rows.num_tokens - 1


def test_the_first_token_is_not_doubled():
    tokenizer = tiny_tokenizer()
    for columns in (
        {"messages": [CHAT]},
        {"text": ["hello"]},
        {"prompt": ["a"], "completion": ["b"]},
    ):
        ids = _tokenized(columns, tokenizer, assistant_only_loss=False).dataset[0]["input_ids"]
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id


def test_text_ends_with_one_end_token():
    tokenizer = tiny_tokenizer()
    rows = _tokenized({"text": ["hello", "hello</s>"]}, tokenizer, assistant_only_loss=False)
    assert rows.dataset[0] == rows.dataset[1]
    assert _supervised_text(rows, tokenizer) == "hello</s>"


def test_a_tokenizer_that_adds_the_end_token_itself_does_not_double_it():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    rows = _tokenized({"text": ["hello"]}, tokenizer, assistant_only_loss=False)
    assert rows.dataset[0]["input_ids"].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("assistant_only_loss", [True, False])
def test_only_the_completion_is_supervised(assistant_only_loss):
    tokenizer = tiny_tokenizer()
    columns = {"prompt": ["what is it?"], "completion": [" the answer"]}
    rows = _tokenized(columns, tokenizer, assistant_only_loss=assistant_only_loss)
    assert preview(rows.dataset, tokenizer) == "<s>what is it?[[ the answer</s>]]"


def test_a_token_that_straddles_prompt_and_completion_is_supervised():
    tokenizer = tiny_tokenizer()
    rows = _tokenized({"prompt": ["what is "], "completion": ["the answer"]}, tokenizer)
    assert preview(rows.dataset, tokenizer) == "<s>what is[[ the answer</s>]]"


def test_the_prompt_is_supervised_too_when_that_is_asked_for():
    tokenizer = tiny_tokenizer()
    rows = _tokenized(
        {"prompt": ["what"], "completion": [" it"]}, tokenizer,
        assistant_only_loss=False, completion_only_loss=False,
    )  # fmt: skip
    assert preview(rows.dataset, tokenizer) == "<s>[[what it</s>]]"


def test_a_completion_of_messages_is_supervised_from_the_generation_prompt_on():
    tokenizer = tiny_tokenizer()
    columns = {"prompt": [CHAT[:4]], "completion": [CHAT[4:]]}
    for assistant_only_loss in (True, False):
        rows = _tokenized(columns, tokenizer, assistant_only_loss=assistant_only_loss)
        assert _supervised_text(rows, tokenizer) == " you are welcome \u2603<|im_end|>\n"


def test_tools_reach_the_template():
    template = "{{ tools[0]['function']['name'] }} {{ mood }} " + CHATML
    columns = {
        "messages": [CHAT],
        "tools": [[{"type": "function", "function": {"name": "weather"}}]],
        "chat_template_kwargs": [{"mood": "calm"}],
    }
    tokenizer = tiny_tokenizer(template)
    rows = _tokenized(columns, tokenizer)
    assert preview(rows.dataset, tokenizer).startswith("weather calm <s>")
    assert rows.unused_columns == ()


CLOSED = CHATML + "{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}"


def test_a_token_that_closes_the_whole_chat_belongs_to_the_last_turn_only():
    tokenizer = tiny_tokenizer(CLOSED)
    text = preview(_tokenized({"messages": [CHAT]}, tokenizer).dataset, tokenizer)
    assert "[[the answer\nis yes<|im_end|>\n]]<|im_start|>user" in text
    assert text.endswith("[[ you are welcome \u2603<|im_end|>\n</s>]]")


STRIPS_EARLIER = CHATML.replace(
    "m['content']", "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'][:3])"
)
OTHER_PROMPT = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
NO_END = CHATML.replace("<|im_end|>", "")
RAISES = "{{ raise_exception('roles must alternate') }}"


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (
            STRIPS_EARLIER,
            r"message 2 \(assistant\): .* renders the turn itself as .* when it goes on",
        ),
        (OTHER_PROMPT, r"message 2 \(assistant\): .* renders the chat before it as .*<think>"),
        (NO_END, r"message 2 .* ends it with no special token, .* would not learn to stop"),
        (RAISES, r"the chat template cannot render it: roles must alternate"),
        (None, r"the tokenizer has no chat template; take the model's instruction-tuned version"),
    ],
)
def test_a_template_that_hides_what_the_assistant_said_is_refused(template, match):
    with pytest.raises(DataError, match=f"^data.train: .*{match}"):
        _tokenized({"messages": [CHAT]}, tiny_tokenizer(template))


def test_a_refusal_names_the_row():
    with pytest.raises(DataError, match=r"^data.train: row 2: starts with the assistant"):
        _tokenized({"messages": [CHAT, CHAT[2:3]]})


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        (
            {"instruction": ["a"], "output": ["b"]},
            r"has the columns instruction, output; needed: mes",
        ),
        ({"prompt": ["a"]}, r"has the columns prompt; needed"),
        ({"messages": [CHAT], "text": ["a"]}, r"fit \(messages\) as well as \(text\); keep one"),
        ({"text": ["a"], "image": ["b"]}, r"has the column image; only text"),
        ({"prompt": ["a", None], "completion": ["b", "c"]}, r"row 2: prompt is missing here"),
        (
            {"prompt": ["a"], "completion": [3]},
            r"row 1: completion is a int; needed: a text or a list",
        ),
        ({"prompt": ["a"], "completion": [CHAT[2:3]]}, r"row 1: .* both texts or both lists"),
        ({"messages": [CHAT, "hi"]}, r"row 2: messages is a str; needed: a list of messages"),
        ({"messages": [[{"from": "human", "value": "a"}]]}, r"row 1: messages\[0\] has no role"),
        ({"messages": [[{"role": "user", "content": None}]]}, r"messages\[0\] has no content"),
    ],
)
def test_rows_of_no_one_form_are_refused(columns, match):
    with pytest.raises(DataError, match=match):
        _tokenized(columns)


def test_text_has_no_assistant():
    with pytest.raises(DataError, match="rows of text have no assistant"):
        _tokenized({"text": ["a"]})


def test_a_tokenizer_without_an_end_token_is_refused_for_text():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="the tokenizer has no eos_token"):
        _tokenized({"text": ["a"]}, tokenizer, assistant_only_loss=False)


def test_rows_without_a_supervised_token_are_dropped_and_counted():
    short, long = "a", "what is the answer to this question " * 3
    columns = {
        "prompt": [short, long, short, short, ""],
        "completion": [" yes", " yes", "", " yes" * 40, "yes"],
        "source": ["x"] * 5,
    }
    rows = _tokenized(columns, max_length=16)
    assert (rows.num_rows, rows.num_dropped, rows.num_truncated) == (3, 2, 1)
    assert rows.dropped == {"empty": (3,), "unsupervised": (2,), "equal": ()}
    labels = [row["labels"] for row in rows.dataset]
    assert rows.num_supervised_tokens == sum(label != -100 for row in labels for label in row)
    assert rows.num_tokens == sum(len(row) for row in labels)
    assert max(len(row) for row in labels) == 16
    assert rows.summary().splitlines()[1].strip() == (
        "1 cut to 16 tokens; 2 dropped: 1 empty (row 3), 1 without a supervised token in its first "
        "16 (row 2); columns not used: source"
    )


def test_when_no_row_is_left_the_counts_are_said():
    columns = {"prompt": ["what is the answer"] * 2 + [""], "completion": [" yes", " no", ""]}
    with pytest.raises(
        DataError,
        match=r"left .* 1 empty \(row 3\), 2 without .* 2 \(rows 1, 2\); raise train.max_l",
    ):
        _tokenized(columns, max_length=2)


def test_a_text_of_one_token_supervises_nothing():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(DataError, match=r"train on: 1 without a supervised token \(row 1\)$"):
        _tokenized({"text": ["</s>"]}, tokenizer, assistant_only_loss=False)


def test_tokenising_is_deterministic_and_leaves_no_cache_file(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    texts = [f"row {i}" for i in range(2500)]  # more than two chunks
    first, second = (_tokenized({"text": texts}, assistant_only_loss=False) for _ in range(2))
    other = _tokenized({"text": [*texts[1:], texts[0]]}, assistant_only_loss=False)
    assert first.dataset.to_list() == second.dataset.to_list()
    assert first.num_rows == 2500
    assert first.digest == second.digest != other.digest
    assert first.dataset.cache_files == []
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_shown_only_on_a_terminal():
    shown = {}
    for is_terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=is_terminal)
        _tokenized({"messages": [CHAT]}, console=console)
        shown[is_terminal] = stream.getvalue()
    assert "tokenising data.train" in shown[True]
    assert shown[False] == ""


def test_the_preview_in_markup_says_the_same_as_the_plain_one():
    tokenizer = tiny_tokenizer()
    rows = _tokenized({"prompt": ["is [bold]it"], "completion": [" [yes]"]}, tokenizer)
    text = Text.from_markup(preview(rows.dataset, tokenizer, markup=True))
    assert text.plain == "<s>is [bold]it [yes]</s>"
    assert [str(span.style) for span in text.spans] == ["dim", "bold green"]


def test_a_long_part_of_the_preview_is_shortened():
    tokenizer = tiny_tokenizer()
    rows = _tokenized({"prompt": ["ab" * 5000], "completion": [" yes"]}, tokenizer)
    assert len(preview(rows.dataset, tokenizer)) < 1300


@pytest.mark.parametrize(("num_rows", "is_enough"), [(0, False), (7, False), (8, True)])
def test_fewer_rows_than_one_step_takes_are_refused_with_both_counts(num_rows, is_enough):
    if is_enough:
        check_enough_rows(num_rows, rows_per_step=8, key="data.train")
        return
    with pytest.raises(DataError, match=f"^data.train: {num_rows} rows, but one step takes 8;"):
        check_enough_rows(num_rows, rows_per_step=8, key="data.train")
