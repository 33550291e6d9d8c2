"""A run of trl's SFTTrainer in one process: its losses are those of our labels, and are written."""

import io
import json
import math

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.errors import ArtifactError, TrainError
from tplora.train.data import tokenize_rows
from tplora.train.metrics import MetricsCallback, read_metrics
from tplora.train.progress import TrainingProgress

NUM_STEPS, BATCH, ACCUMULATION = 3, 2, 2


def _rows():
    chats = [
        [
            {"role": "user", "content": "what is it? " * i},
            {"role": "assistant", "content": "the answer " * (13 - i)},
        ]
        for i in range(1, 13)
    ]
    return tokenize_rows(
        Dataset.from_dict({"messages": chats}), tiny_tokenizer(),
        max_length=128, assistant_only_loss=True, key="data.train",
    )  # fmt: skip


def _model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=1,
        pad_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _trainer(folder, callback, *, eval_rows=None, **options):
    options = {"max_steps": NUM_STEPS, "learning_rate": 1e-2, "logging_steps": 1} | options
    args = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION, dataset_kwargs={"skip_prepare_dataset": True},
        train_sampling_strategy="sequential", optim="sgd", lr_scheduler_type="linear",
        report_to="none", disable_tqdm=True, use_cpu=True, bf16=False, save_strategy="no",
        activation_checkpointing=False, dataloader_pin_memory=False, seed=0,
        **{"logging_nan_inf_filter": False, "include_num_input_tokens_seen": "non_padding"}
        | options,
    )  # fmt: skip
    trainer = SFTTrainer(
        _model(), args=args, train_dataset=_rows().dataset, eval_dataset=eval_rows,
        processing_class=tiny_tokenizer(), callbacks=[callback],
    )  # fmt: skip
    trainer.remove_callback(next(
        c for c in trainer.callback_handler.callbacks if type(c).__name__ == "PrinterCallback"
    ))  # fmt: skip
    return trainer


def _own_losses(labels_column="labels"):
    """The same steps in plain torch: one mean over the supervised tokens of a whole step."""
    model, rows = _model(), _rows().dataset
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        taken = [rows[step * BATCH * ACCUMULATION + k] for k in range(BATCH * ACCUMULATION)]
        sums, count = [], 0
        for row in taken:  # one by one, so no padding can matter
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
            labels = torch.tensor(row[labels_column][1:])
            sums.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            count += int((labels != -100).sum())
        loss = torch.stack(sums).sum() / count
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / NUM_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps with an evaluation at the end, on a console that is no terminal."""
    folder = tmp_path_factory.mktemp("run")
    stream = io.StringIO()
    with TrainingProgress(Console(file=stream, width=40)) as progress:
        callback = MetricsCallback(
            folder / "metrics.jsonl", tp_size=1, is_writer=True, progress=[progress]
        )
        trainer = _trainer(
            folder, callback, eval_rows=_rows().dataset, eval_strategy="steps", eval_steps=NUM_STEPS
        )
        trainer.train()
    return trainer, folder / "metrics.jsonl", stream.getvalue()


def test_the_losses_are_those_of_our_labels(run):
    trained = [record["loss"] for record in read_metrics(run[1]) if "loss" in record]
    torch.testing.assert_close(trained, _own_losses(), rtol=0, atol=2e-6)


def test_the_comparison_sees_labels_that_supervise_the_prompt(run):
    trained = [record["loss"] for record in read_metrics(run[1]) if "loss" in record]
    others = _own_losses("input_ids")
    assert all(abs(a - b) > 1e-3 for a, b in zip(trained, others, strict=True))


def test_each_logged_step_is_one_object_with_unrounded_numbers(run):
    trainer, path, _ = run
    records = [json.loads(line) for line in path.read_text().splitlines()]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    for record, entry in zip(records, logged, strict=False):
        assert list(record) == [
            "step", "loss", "grad_norm", "learning_rate", "tokens_per_s", "peak_bytes",
        ]  # fmt: skip
        for name in ("loss", "grad_norm", "learning_rate"):
            assert record[name] == entry[name]
            assert name == "learning_rate" or record[name] != round(record[name], 6)
        assert record["tokens_per_s"] > 0
        assert record["peak_bytes"] > 10 * 2**20
    assert list(records[-1]) == ["step", "eval_loss"]


def test_plain_lines_are_shown_when_not_on_a_terminal(run):
    lines = run[2].splitlines()
    assert len(lines) == 4
    words = r"loss {loss:.4g}  grad_norm {grad_norm:.3g}  lr {learning_rate:.1e}"
    for number, (line, record) in enumerate(zip(lines[:3], read_metrics(run[1]), strict=False), 1):
        assert line.startswith(f"step {number}/3  " + words.format(**record))
        assert line.endswith("GiB")
    assert lines[3].startswith("step 3/3  eval_loss ")


def test_every_token_but_padding_is_counted_once(run):
    assert run[0].state.num_input_tokens_seen == _rows().num_tokens


def _events(callback, args, *, tokens=0, step=0, max_steps=4):
    state = TrainerState(global_step=step, max_steps=max_steps, num_input_tokens_seen=tokens)
    return args, state, TrainerControl()


@pytest.fixture
def args(tmp_path):
    return SFTConfig(
        output_dir=str(tmp_path), logging_nan_inf_filter=False, use_cpu=True, bf16=False,
        include_num_input_tokens_seen="non_padding", activation_checkpointing=False,
    )  # fmt: skip


def test_speed_counts_a_tp_group_once_and_leaves_evaluations_out(tmp_path, args, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    path = tmp_path / "metrics.jsonl"
    callback = MetricsCallback(path, tp_size=3, is_writer=True)

    def at(seconds, event, **state):
        now[0] = seconds
        logs = {"logs": {"loss": 1.0}} if event == "on_log" else {}
        getattr(callback, event)(*_events(callback, args, **state), **logs)

    at(10, "on_train_begin", tokens=900)
    at(11, "on_step_end", step=1, tokens=1200)
    at(61, "on_evaluate", step=1, tokens=1200)
    at(63, "on_step_end", step=2, tokens=1500)
    at(64, "on_log", step=2, tokens=1500)
    at(99, "on_save", step=2, tokens=1500)
    at(100, "on_step_end", step=3, tokens=1800)
    at(100, "on_log", step=3, tokens=1800)
    assert [record["tokens_per_s"] for record in read_metrics(path)] == [600 / 3 / 4, 300 / 3 / 1]


@pytest.mark.parametrize("is_writer", [True, False])
@pytest.mark.parametrize(
    ("logs", "match"),
    [
        ({"loss": math.nan, "grad_norm": 1.0}, r"^step 7: loss is nan; training stopped"),
        ({"loss": 1.0, "grad_norm": math.inf}, r"^step 7: grad_norm is inf;"),
        ({"eval_loss": math.nan}, r"^step 7: eval_loss is nan;"),
        ({"train_loss": math.nan}, r"^step 7: train_loss is nan;"),
    ],
)
def test_a_number_that_is_not_finite_stops_every_rank(tmp_path, args, logs, match, is_writer):
    callback = MetricsCallback(tmp_path / "metrics.jsonl", tp_size=1, is_writer=is_writer)
    with pytest.raises(TrainError, match=match):
        callback.on_log(*_events(callback, args, step=7), logs=logs)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_step_that_fp16_scaling_skips_is_written_without_a_norm(tmp_path, args):
    args.fp16 = True
    callback = MetricsCallback(tmp_path / "metrics.jsonl", tp_size=1, is_writer=True)
    logs = {"loss": 1.0, "grad_norm": math.inf, "learning_rate": 0.0}
    callback.on_log(*_events(callback, args, step=1), logs=logs)
    assert '"grad_norm": null' in (tmp_path / "metrics.jsonl").read_text()


def test_a_model_that_turns_to_nan_stops_the_run(tmp_path):
    callback = MetricsCallback(tmp_path / "metrics.jsonl", tp_size=1, is_writer=True)
    trainer = _trainer(tmp_path, callback)
    with torch.no_grad():
        trainer.model.model.norm.weight[0] = math.nan
    with pytest.raises(TrainError, match=r"step 1: loss is nan"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"logging_nan_inf_filter": True}, "logging_nan_inf_filter = true: it hides losses"),
        ({"include_num_input_tokens_seen": "no"}, 'tokens_seen = "no": .* set it to "non_padding"'),
    ],
)
def test_arguments_that_would_falsify_the_metrics_are_refused(tmp_path, args, options, match):
    for name, value in options.items():
        setattr(args, name, value)
    callback = MetricsCallback(tmp_path / "metrics.jsonl", tp_size=1, is_writer=True)
    with pytest.raises(TrainError, match=match):
        callback.on_train_begin(*_events(callback, args))


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path, args):
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "loss": 0.1234567890123}}' for step in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    other = MetricsCallback(path, tp_size=1, is_writer=False)
    other.on_train_begin(*_events(other, args, step=2))
    assert len(read_metrics(path)) == 4
    callback = MetricsCallback(path, tp_size=1, is_writer=True)
    callback.on_train_begin(*_events(callback, args, step=2))
    assert path.read_text() == "\n".join(lines[:2]) + "\n"


def test_a_file_with_a_broken_line_inside_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ArtifactError, match="line 2: not a JSON object"):
        read_metrics(path)


def test_a_file_that_cannot_be_written_is_an_artifact_error(tmp_path, args):
    callback = MetricsCallback(tmp_path / "no" / "metrics.jsonl", tp_size=1, is_writer=True)
    with pytest.raises(ArtifactError, match="cannot be written"):
        callback.on_log(*_events(callback, args, step=1), logs={"loss": 1.0})


def _show_and_fail(console):
    with TrainingProgress(console) as progress:
        progress.begin(0, 4)
        progress.advance(1)
        progress.show_record({"step": 1, "loss": 1.5, "learning_rate": 1e-4})
        progress.show_evaluation(2)
        progress.show_record({"step": 1, "eval_loss": 1.25})
        raise TrainError("stop")


def test_on_a_terminal_a_bar_is_shown_and_the_cursor_given_back_after_an_error():
    stream = io.StringIO()
    with pytest.raises(TrainError):
        _show_and_fail(Console(file=stream, force_terminal=True, width=120))
    shown = stream.getvalue()
    assert "step 1/4  eval_loss 1.25" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
