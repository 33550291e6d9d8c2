"""The fused head on 2 and 3 ranks against trl's own in one process, and against whole logits."""

import copy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from tests.models import CUT, SEED, InDouble, batches, load_plain, lora, world_size
from tests.parity import assert_is_shard, assert_same_on_all_ranks
from tests.tiny import VOCAB
from tests.world import RankError
from tplora.adapter.attach import attach_adapter
from tplora.adapter.head import chunked
from tplora.adapter.head.fused import install_fused_head
from tplora.base.load import load_base

pytestmark = pytest.mark.world

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
ATOL = 1e-10
TRL_ATOL = 5e-6
"""trl computes its statistics in float32 whatever the model's dtype."""


@dataclass(frozen=True)
class Case:
    """One head. Plain values: it travels to the ranks."""

    targets: list[str] = field(default_factory=lambda: ["q_proj", "down_proj"])
    temperature: float = 1.0
    labels: str = "some"
    """"some", "none" or "shifted"."""
    dropout: float = 0.0
    chunk: int = 5
    """Tokens of one chunk; the batch has more."""


def _inputs(case):
    batch = batches(1)[0]
    labels = batch.pop("labels")
    if case.labels == "none":
        labels = torch.full_like(labels, -100)
    if case.labels == "shifted":
        return batch | {"shift_labels": labels.roll(-1, dims=1)}
    return batch | {"labels": labels}


def _backward(outputs):
    """From both outputs that carry gradients, with weights that differ between tokens."""
    weights = torch.linspace(0.5, 1.5, outputs.log_probs.numel(), dtype=torch.float64)
    weights = weights.view_as(outputs.log_probs)
    (outputs.loss + (outputs.entropy * weights).sum() / 7).backward()


def _config(case):
    # Random factors: with B = 0 the gradient of A is zero and its errors are hidden.
    return lora(target_modules=case.targets, dropout=case.dropout, init_lora_weights=False)


def _plain(path, case):
    """trl's head in one process on a plain PEFT model: outputs and gradients."""
    model = load_plain(path, _config(case))
    add_fused_lm_head(model.get_base_model(), temperature=case.temperature, outputs=OUTPUTS)
    with InDouble():
        outputs = model(**_inputs(case), fused_lm_head=True)
        _backward(outputs)
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def _here(path, case):
    """Ours on this rank's shards."""
    base = load_base(path, tp_size=world_size(), dtype=torch.float64)
    add_fused_lm_head(base, temperature=case.temperature, outputs=OUTPUTS)
    model = attach_adapter(base, _config(case), seed=SEED).train()
    install_fused_head(base)
    piece = -(-VOCAB // world_size())
    with mock.patch.object(chunked, "CHUNK_BYTES", 4 * case.chunk * piece), InDouble():
        outputs = model(**_inputs(case), fused_lm_head=True)
        _backward(outputs)
    return model, outputs


def _assert_same(model, outputs, wanted, grads, *, atol=ATOL):
    for name in ("loss", *OUTPUTS, "label_mask"):
        found, full = (getattr(o, name).detach() for o in (outputs, wanted))
        if found.dtype == torch.bool:
            assert torch.equal(found, full.to(torch.bool)), name
            continue
        assert_is_shard(shard=found, full=full.to(found.dtype), dim=None, what=name, atol=atol)
        assert_same_on_all_ranks(tensor=found, what=name)
    for name, factor in model.factors().items():
        assert_is_shard(
            shard=factor.parameter.grad,
            full=grads[name],
            dim=factor.plan.shard_dim,
            what=f"grad of {name}",
            atol=atol,
        )


def _equals_trl_and_whole_logits(path, case):
    here = _here(path, case)
    _assert_same(*here, *_plain(path, case), atol=TRL_ATOL)
    _assert_same(*here, *_whole_logits(path, case))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama", Case()),
        ("qwen2_tied", Case(temperature=0.7)),
        ("gemma2", Case()),
        ("cohere", Case()),
        ("granite", Case(temperature=1.3)),
        ("llama", Case(labels="none")),
        ("llama", Case(labels="shifted")),
        ("llama", Case(chunk=1000)),
    ],
    ids=["plain", "tied", "softcap", "scaled", "divided", "no-labels", "shifted", "1-chunk"],
)
def test_a_frozen_head_equals_trls_own_and_whole_logits(world, checkpoint, name, case):
    world.run(_equals_trl_and_whole_logits, checkpoint(name, **CUT), case)


def _whole_logits(path, case):
    """The truth from plain PEFT's whole logits; trl has none for a head with an adapter."""
    model = load_plain(path, _config(case))
    inputs = _inputs(case)
    labels = inputs.pop("shift_labels", None)
    with InDouble():
        if labels is None:
            labels = inputs.pop("labels")[:, 1:]
            z = model(**inputs).logits[:, :-1]
        else:
            z = model(**inputs).logits
    z = z / case.temperature
    mask = labels != -100
    log_p = z.log_softmax(-1)
    chosen = labels.clamp(min=0)
    log_probs = log_p.gather(-1, chosen[..., None]).squeeze(-1)
    fields = {
        "log_probs": log_probs,
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": log_p.exp().square().sum(-1).log(),
        "mean_logits": z.mean(-1),
        "is_top1": z.argmax(-1) == chosen,
    }
    fields = {name: value * mask for name, value in fields.items()}
    loss = -fields["log_probs"].sum() / mask.sum().clamp(min=1)
    outputs = Outputs(loss=loss, label_mask=mask, **fields)
    _backward(outputs)
    return outputs, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


class Outputs:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def _equals_whole_logits(path, case):
    _assert_same(*_here(path, case), *_whole_logits(path, case))


@pytest.mark.parametrize("name", ["llama", "qwen2_tied"])
@pytest.mark.parametrize("targets", [["lm_head"], ["lm_head", "embed_tokens", "down_proj"]])
def test_an_adapted_head_equals_whole_logits(world, checkpoint, name, targets):
    case = Case(targets=targets, temperature=0.7)
    world.run(_equals_whole_logits, checkpoint(name, **CUT), case)


class LargestLogits(TorchDispatchMode):
    """Rows of the largest new tensor that has a column per token of this rank's vocabulary."""

    def __init__(self, columns):
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its own dispatch comes back here with local tensors
        result = func(*args, **(kwargs or {}))
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs))}
        for leaf in tree_leaves(result):
            is_new = _storage(leaf) not in given | {None}
            if is_new and leaf.ndim and leaf.shape[-1] in self.columns:
                self.rows = max(self.rows, leaf.numel() // leaf.shape[-1])
        return result


def _storage(leaf):
    """Where a plain tensor's numbers are; None for what only wraps another."""
    is_plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
    return leaf.untyped_storage().data_ptr() if is_plain else None


def _largest_logits(path, case):
    first = -(-VOCAB // world_size())
    columns = {VOCAB, first, VOCAB - first * (world_size() - 1)}
    with LargestLogits(columns) as seen:
        _here(path, case)
    return seen.rows


def test_no_rank_ever_holds_more_logits_than_a_chunk(world, checkpoint):
    path = checkpoint("llama", **CUT)
    targets = ["lm_head", "q_proj"]
    num_labels = int((batches(1)[0]["labels"][:, 1:] != -100).sum())
    assert num_labels > 10
    for chunk, allowed in ((5, 5), (1000, num_labels)):
        case = Case(targets=targets, chunk=chunk)
        assert world.run(_largest_logits, path, case) == [allowed] * world.size


def _breaks(path, case):
    with mock.patch("tplora.adapter.head.defer.replicate_input", lambda x, _: x):
        _equals_trl_and_whole_logits(path, case)


def test_parity_sees_a_head_that_does_not_sum_its_inputs_gradient(world2, checkpoint):
    with pytest.raises(RankError, match="grad of base_model"):
        world2.run(_breaks, checkpoint("llama", **CUT), Case())


def _generates_and_scores(path):
    base = load_base(path, tp_size=world_size(), dtype=torch.float64)
    add_fused_lm_head(base, outputs=OUTPUTS)
    install_fused_head(base)
    batch = copy.copy(batches(1)[1])
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    assert_is_shard(
        shard=base(**batch).logits, full=plain(**batch).logits, dim=None, what="logits", atol=1e-6
    )
    batch.pop("labels")
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found, wanted = (model.generate(**batch, **settings) for model in (base, plain))
    assert torch.equal(found, wanted)


def test_without_the_fused_head_the_forward_is_the_models_own(world2, checkpoint):
    world2.run(_generates_and_scores, checkpoint("llama", **CUT))
