"""trl's own DPOTrainer over a tplora model: it copies the adapter into a frozen one, "ref"."""

import datasets
import pytest
import torch
from transformers import PrinterCallback
from trl import DPOConfig, DPOTrainer

from tests.models import CUT, InDouble, load, lora
from tests.train.tiny_tokenizer import tiny_tokenizer
from tests.train.training import logged_numbers
from tplora.adapter.head.fused import install_fused_head
from tplora.train.parallelism import parallelism_config

pytestmark = pytest.mark.world

SIZES = CUT | {"vocab_size": 512, "max_position_embeddings": 256}


def _rows(num_rows):
    return [
        {
            "prompt": f"what is {k} and {k}?" + " now" * (k % 3),
            "chosen": f" the answer is {2 * k}",
            "rejected": " nobody knows" * (1 + k % 2),
        }
        for k in range(num_rows)
    ]


def _train(path, folder, is_ours):
    datasets.disable_progress_bars()
    model = load(path, lora("all-linear", init_lora_weights=False))
    args = DPOConfig(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        gradient_checkpointing=False,
        max_grad_norm=0.05,
        parallelism_config=parallelism_config(model),
    )
    trainer = DPOTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(_rows(12)),
        processing_class=tiny_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    if is_ours:
        install_fused_head(model.get_base_model())
    before = {name: factor.full() for name, factor in model.factors("ref").items()}
    with InDouble():
        trainer.train()
    for name, factor in model.factors("ref").items():
        assert torch.equal(factor.full(), before[name]), "the reference is frozen"
        assert not factor.parameter.requires_grad
    factors = {name: factor.full().cpu() for name, factor in model.factors().items()}
    return logged_numbers(trainer.state.log_history), factors


@pytest.mark.parametrize("is_ours", [False, True], ids=["trl's head", "cut head"])
def test_dpo_trains_as_in_one_process(world2, alone, checkpoint, tmp_path, is_ours):
    path = checkpoint("llama", **SIZES)
    logs, factors = alone.run(_train, path, tmp_path / "alone", is_ours)[0]
    assert {"rewards/margins", "loss", "grad_norm"} <= logs[0].keys()
    for found_logs, found in world2.run(_train, path, tmp_path / "here", is_ours):
        assert len(found_logs) == len(logs)
        for entry, wanted in zip(found_logs, logs, strict=True):
            assert entry == pytest.approx(wanted, rel=1e-6, abs=1e-9)
        for name, factor in found.items():
            torch.testing.assert_close(factor, factors[name], rtol=0, atol=1e-7, msg=name)
