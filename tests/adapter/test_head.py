"""Heads that defer their logits: the losses of models and trainers, against plain PEFT's."""

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.trainer_pt_utils import LabelSmoother

from tests.communication import count_collectives
from tests.models import CUT, InDouble, batches, load, load_plain, lora, world_size
from tests.parity import assert_is_shard
from tests.tiny import VOCAB
from tests.train.test_head import LargestLogits
from tests.world import RankError
from tplora.adapter.head import chunked, deferred, reading
from tplora.adapter.head.deferred import DeferredLogits
from tplora.errors import ShardError

pytestmark = pytest.mark.world

ATOL = 1e-10
CHUNK = 5
"""Tokens a chunk, of 27."""


@dataclass(frozen=True)
class Case:
    """One loss of one model. Plain values: it travels to the ranks."""

    loss: str = "labels"
    targets: tuple[str, ...] = ("q_proj", "down_proj")
    changes: dict[str, Any] = field(default_factory=dict)
    training: bool = True


def _labels(model, batch):
    return model(**batch).loss


def _items(model, batch):
    return model(**batch, num_items_in_batch=torch.tensor(40)).loss


def _shifted(model, batch):
    labels = batch["labels"].roll(-1, dims=1)
    return model(**batch, shift_labels=labels).loss


def _trainers_smoothing(model, batch):
    labels = batch.pop("labels")
    return LabelSmoother(0.2)(model(**batch), labels, shift_labels=True)


def _logits(model, batch):
    labels = batch.pop("labels")
    z = model(**batch).logits[:, :-1]
    return z.float().reshape(-1, VOCAB), labels[:, 1:].reshape(-1)


def _torchs_smoothing(model, batch):
    return F.cross_entropy(*_logits(model, batch), label_smoothing=0.3)


def _weighted(model, batch):
    """A weight for each token, as a trainer's own loss may have."""
    losses = nn.CrossEntropyLoss(reduction="none")(*_logits(model, batch))
    return (losses * torch.linspace(0.5, 2, len(losses), dtype=losses.dtype)).sum() / 7


def _z_loss(model, batch):
    z, labels = _logits(model, batch)
    return F.cross_entropy(z, labels, reduction="sum") / 9 + 0.1 * z.logsumexp(-1).square().mean()


def _changed(model, batch):
    """What a trainer may do to logits itself."""
    z, labels = _logits(model, batch)
    z = torch.tanh(z / 3.0) * 3.0
    z /= torch.tensor(0.7, dtype=z.dtype)
    return F.cross_entropy(-z, labels)


def _unknown(model, batch):
    """No part of it has a name here."""
    z, labels = _logits(model, batch)
    return (
        z.sort(-1).values[..., -3:].square().mean() + z.softmax(-1)[:, 5].sum() + 0 * labels.sum()
    )


LOSSES = {
    "labels": _labels,
    "items": _items,
    "shifted": _shifted,
    "trainers-smoothing": _trainers_smoothing,
    "torchs-smoothing": _torchs_smoothing,
    "weighted": _weighted,
    "z-loss": _z_loss,
    "changed": _changed,
    "unknown": _unknown,
}


def _run(model, case):
    with InDouble():
        loss = LOSSES[case.loss](model.train(case.training), dict(batches(1)[0]))
    loss.backward()
    return loss.detach()


def _chunked(tokens=CHUNK):
    piece = -(-VOCAB // world_size())
    return mock.patch.object(chunked, "CHUNK_BYTES", 4 * tokens * piece)


def _config(case):
    return lora(target_modules=list(case.targets), init_lora_weights=False, **case.changes)


def _equals_plain_peft(path, case):
    plain = load_plain(path, _config(case))
    wanted = _run(plain, case)
    model = load(path, _config(case))
    with _chunked():
        found = _run(model, case)
    assert_is_shard(shard=found, full=wanted, dim=None, what="loss", atol=ATOL)
    grads = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    for name, factor in model.factors().items():
        assert_is_shard(
            shard=factor.parameter.grad,
            full=grads[name],
            dim=factor.plan.shard_dim,
            what=f"grad of {name}",
            atol=ATOL,
        )


ENDS = ("lm_head", "o_proj")
CASES = {
    **{name: ("llama", Case(name)) for name in LOSSES},
    "tied": ("qwen2_tied", Case()),
    "softcap": ("gemma2", Case()),
    "scaled": ("cohere", Case("items")),
    "divided": ("granite", Case("trainers-smoothing")),
    "own z-loss": ("bamba", Case()),
    "adapted": ("llama", Case(targets=ENDS)),
    "adapted-smoothed": ("llama", Case("trainers-smoothing", targets=ENDS)),
    "adapted-unknown": ("llama", Case("unknown", targets=ENDS)),
    "adapted alone": ("llama", Case("z-loss", targets=("lm_head",))),
    "trained": ("llama", Case("weighted", changes={"modules_to_save": ["lm_head"]})),
    "tokens-tied": ("qwen2_tied", Case(changes={"trainable_token_indices": [22, 5, 126]})),
    "evaluated": ("llama", Case(training=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_equals_plain_pefts(world, checkpoint, name):
    model, case = CASES[name]
    world.run(_equals_plain_peft, checkpoint(model, **CUT), case)


@pytest.mark.parametrize("name", ["labels", "trainers-smoothing", "adapted", "own z-loss"])
def test_a_loss_equals_plain_pefts_alone(alone, checkpoint, name):
    model, case = CASES[name]
    alone.run(_equals_plain_peft, checkpoint(model, **CUT), case)


# --- what is never held


def _largest(path, case, chunk):
    first = -(-VOCAB // world_size())
    columns = {VOCAB, first, VOCAB - first * (world_size() - 1)}
    model = load(path, _config(case))
    with LargestLogits(columns) as seen, _chunked(chunk):
        _run(model, case)
    return seen.rows


@pytest.mark.parametrize(
    "name",
    ["labels", "items", "trainers-smoothing", "torchs-smoothing", "weighted", "z-loss", "changed"],
)
def test_no_rank_ever_holds_more_logits_than_a_chunk(world, checkpoint, name):
    path = checkpoint("llama", **CUT)
    assert set(world.run(_largest, path, Case(name), CHUNK)) == {CHUNK}


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "bamba"])
def test_no_model_makes_a_rank_hold_them(world2, checkpoint, name):
    assert set(world2.run(_largest, checkpoint(name, **CUT), Case(), CHUNK)) == {CHUNK}


def test_one_process_holds_no_more_than_a_chunk_either(alone, checkpoint):
    assert alone.run(_largest, checkpoint("llama", **CUT), Case(), CHUNK) == [CHUNK]


def test_only_supervised_tokens_go_through_the_head(world2, checkpoint):
    supervised = int((batches(1)[0]["labels"][:, 1:] != -100).sum())
    assert supervised < batches(1)[0]["labels"].numel()
    found = world2.run(_largest, checkpoint("llama", **CUT), Case(), 1000)
    assert found == [supervised] * 2


def test_the_watch_sees_whole_logits(world2, checkpoint):
    tokens = batches(1)[0]["labels"][:, 1:].numel()
    found = world2.run(_largest, checkpoint("llama", **CUT), Case("unknown"), CHUNK)
    assert found == [tokens] * 2


# --- what else is read


def _reads(path):
    case = Case()
    plain = load_plain(path, _config(case)).eval()
    model = load(path, _config(case)).eval()
    batch = dict(batches(1)[0])
    with InDouble(), torch.no_grad():
        wanted, found = plain(**batch).logits, model(**batch).logits
        assert isinstance(found, DeferredLogits)
        assert (found.shape, found.dtype, found.device) == (
            wanted.shape, wanted.dtype, wanted.device
        )  # fmt: skip
        for read in (
            lambda z: z.argmax(-1),
            lambda z: z.detach().argmax(dim=-1, keepdim=True),
            lambda z: z[:, 1:-1].argmax(-1),
            lambda z: z[0, 2].double(),
            lambda z: z[..., 3:7],
            lambda z: z[batch["attention_mask"].bool()].logsumexp(-1),
            lambda z: z[:, torch.tensor([1, 4])].flatten(0, 1),
            lambda z: z.log_softmax(-1).sum(-1),
            lambda z: z.softmax(-1).max(-1).values,
            lambda z: z.cpu(),
            lambda z: torch.cat([z, z]),
            lambda z: z.numpy(),
            lambda z: z.contiguous().view(-1, VOCAB)[3],
            lambda z: 1.0 + 2.0 * z,
            lambda z: torch.stack(list(z)),
        ):
            one, other = (torch.as_tensor(read(z)) for z in (found, wanted))
            if isinstance(one, DeferredLogits):
                one = one.whole()
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
        # Without labels, nothing is deferred where nothing is learned.
        del batch["labels"]
        assert type(model(**batch).logits) is torch.Tensor


def test_whatever_is_read_is_what_the_whole_logits_say(world2, checkpoint):
    world2.run(_reads, checkpoint("llama", **CUT))


def _reads_too_late(path):
    model = load(path, lora(target_modules=["lm_head"], init_lora_weights=False)).eval()
    batch = batches(1)[0]
    known, unknown = (model(**batch).logits for _ in range(2))
    early = known.argmax(-1), known.sum()
    model.merge_adapter()
    assert torch.equal(known.sum(), early[1])
    with pytest.raises(ShardError, match="the head's weights have changed since the model ran"):
        unknown.argmax(-1)
    with pytest.raises(ShardError, match="changed since the model ran"):
        unknown.sum()


def test_logits_that_would_be_another_models_are_refused(world2, checkpoint):
    world2.run(_reads_too_late, checkpoint("llama", **CUT))


def _communication(path):
    model = load(path, _config(Case()))
    batch = dict(batches(1)[0])
    with_labels = count_collectives(lambda: model(**batch))
    model.eval()
    del batch["labels"]
    whole = count_collectives(lambda: model(**batch))
    return with_labels, whole


def test_a_loss_sends_as_often_as_whole_logits_and_less(world2, checkpoint):
    for with_labels, whole in world2.run(_communication, checkpoint("llama", **CUT)):
        assert with_labels == whole


# --- broken on purpose


def _breaks(path, name):
    breaks = {
        "input not summed": mock.patch("tplora.adapter.head.defer.replicate_input", _same),
        "change forgotten": mock.patch.object(deferred._Recipe, "_changed", lambda self, z: z),
        "ignored not dropped": mock.patch.object(reading, "_IGNORED", 5),
    }
    with breaks[name]:
        _equals_plain_peft(path, Case("labels" if name != "ignored not dropped" else "weighted"))


def _same(x, _group):
    return x


@pytest.mark.parametrize(
    ("name", "model", "seen"),
    [
        ("input not summed", "llama", "grad of"),
        ("change forgotten", "gemma2", "loss"),
    ],
)
def test_parity_sees(world2, checkpoint, name, model, seen):
    with pytest.raises(RankError, match=f"AssertionError: {seen}"):
        world2.run(_breaks, checkpoint(model, **CUT), name)
