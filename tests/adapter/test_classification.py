"""Sequences are classified through transformers' own Trainer; the score head is trained whole."""

import datasets
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from tests.models import CUT, SEED, InDouble, lora
from tests.parity import assert_is_shard
from tests.tiny import VOCAB, tiny_config
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.errors import PlanError, ShardError
from tplora.plan.build import plan_model
from tplora.train.parallelism import parallelism_config
from tplora.upstream import local_shard

pytestmark = pytest.mark.world

LABELS, PAD = 3, 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny llama with a score head of three labels."""
    folder = tmp_path_factory.mktemp("classifier")
    config = tiny_config("llama", **CUT, num_labels=LABELS, pad_token_id=PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).to(torch.float64)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return str(folder)


def _base(path, *, is_cut):
    auto = AutoModelForSequenceClassification
    if is_cut:
        size = dist.get_world_size()
        return load_base(path, tp_size=size, model_class=auto, dtype=torch.float64)
    return auto.from_pretrained(path, dtype=torch.float64)


def _config():
    return lora(target_modules=["q_proj", "down_proj"], task_type="SEQ_CLS")


def _ours(path):
    base = _base(path, is_cut=dist.is_initialized())
    return attach_adapter(base, _config(), seed=SEED)


def _plain(path):
    base = _base(path, is_cut=False)
    torch.manual_seed(SEED)
    return get_peft_model(base, _config())


def _rows(num_rows):
    generator = torch.Generator().manual_seed(8)
    rows = []
    for k in range(num_rows):
        tokens = torch.randint(3, VOCAB, (5 + k % 4,), generator=generator).tolist()
        rows.append({"input_ids": tokens, "labels": k % LABELS})
    return rows


def _collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [PAD] * (longest - len(row["input_ids"])) for row in rows]
    tokens = torch.tensor(padded)
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def _train(model, folder):
    """transformers' own trainer; the losses it logged."""
    datasets.disable_progress_bars()
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.05,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        parallelism_config=parallelism_config(model),
    )
    rows = datasets.Dataset.from_list(_rows(20))
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=_collate)
    trainer.remove_callback(PrinterCallback)
    with InDouble():
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _trained_alone(path, folder):
    model = _plain(path)
    losses = _train(model, folder)
    return losses, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def _trains_as_alone(path, folder, losses, wanted):
    model = _ours(path)
    assert _train(model, folder) == pytest.approx(losses, rel=1e-9)
    assert model.factors().keys() == wanted.keys()
    for name, factor in model.factors().items():
        assert_is_shard(
            shard=factor.parameter.detach(),
            full=wanted[name],
            dim=factor.plan.shard_dim,
            what=name,
            atol=1e-9,  # ten losses of the trainer's own, which rounds
        )
    model.save_pretrained(folder / "adapter")
    with torch.no_grad():
        return model.eval()(**_collate(_rows(5))).logits.numpy()


def _reloaded(path, folder):
    plain = PeftModel.from_pretrained(_base(path, is_cut=False), folder / "adapter")
    assert any(key.startswith("score") for key, _ in plain.get_base_model().named_modules())
    with torch.no_grad():
        return plain.eval()(**_collate(_rows(5))).logits.numpy()


def test_a_classifier_trains_as_in_one_process(world, alone, checkpoint, tmp_path):
    losses, wanted = alone.run(_trained_alone, checkpoint, tmp_path)[0]
    assert any("score.modules_to_save" in name for name in wanted)
    logits = world.run(_trains_as_alone, checkpoint, tmp_path, losses, wanted)[0]
    assert abs(alone.run(_reloaded, checkpoint, tmp_path)[0] - logits).max() < 1e-6


def _drawn_by_each_rank(path):
    """A score head that no checkpoint holds."""
    base = _base(path, is_cut=True)
    with torch.no_grad():
        local_shard(base.score.weight).normal_()
    with pytest.raises(ShardError, match=r"score.*differs between the ranks.*set_seed"):
        attach_adapter(base, _config())


def test_a_head_that_each_rank_drew_for_itself_is_refused(world2, checkpoint):
    world2.run(_drawn_by_each_rank, checkpoint)


def test_heads_that_peft_names_itself_may_be_missing(checkpoint):
    """PEFT writes both of its names into the config's list, and no model has both."""
    model = _base(checkpoint, is_cut=False)
    config = lora(target_modules=["q_proj"], task_type="SEQ_CLS", modules_to_save=["norm"])
    get_peft_model(_base(checkpoint, is_cut=False), config)
    assert config.modules_to_save == ["norm", "classifier", "score"]
    plan = plan_model(model, config, tp_size=1, base_dtype="float64")
    assert "score" in {part.name for part in plan.trained}
    config.modules_to_save.append("scores")
    with pytest.raises(PlanError, match="'scores' matches no module"):
        plan_model(model, config, tp_size=1, base_dtype="float64")


def _other_task(path):
    with pytest.raises(PlanError, match=r"task_type = .*allowed is \"CAUSAL_LM\", \"SEQ_CLS\""):
        attach_adapter(_base(path, is_cut=True), lora(task_type="TOKEN_CLS"))


def test_another_task_is_refused_by_name(world2, checkpoint):
    world2.run(_other_task, checkpoint)
