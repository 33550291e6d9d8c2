"""Invariants of a whole model, each broken on purpose, and where parity must see it."""

from unittest import mock

import torch
import torch.nn.functional as F

from tests.models import Case
from tplora.adapter import attach
from tplora.adapter.dropout import ForwardSeed
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.gradients import GradientSync
from tplora.adapter.sequence import CutSequence
from tplora.collectives.operators import reduce_partial
from tplora.upstream import local_shard


def _foreign_tokens_not_masked(self, x, *_):
    rows = local_shard(self.get_base_layer().weight)
    start = self.mesh.get_local_rank() * rows.shape[0]
    own = (x - start).clamp(0, rows.shape[0] - 1)
    return reduce_partial(self._add_delta(F.embedding(own, rows), own), self.mesh.get_group())


def _attach_by_rank(model, config, *, seed, **settings):
    seed += torch.distributed.get_rank()
    return attach.attach_adapter(model, config, seed=seed, **settings)


def _as_without_tokens(_sequence, layers, trained):
    return layers, trained


def _drop_own(self, dropout, x):
    return F.dropout(x, dropout.p, dropout.training)


TRAINED_ON_TOKENS = {"modules_to_save": ["input_layernorm"], "bias": "lora_only"}
MODELS = {
    "biases and norms of tokens left out of the bucket": "llama_bias",
    "a residual dropout of each rank's own": "gpt_neox",
}
"""On which models these are seen; llama where nothing is said."""

BREAKS = {
    "the bucket skipped": (
        Case(),
        lambda: mock.patch.object(GradientSync, "_reduce"),
        "step 1: grad of .*lora_B",
    ),
    "the bucket summed twice": (
        Case(is_reduced_each_backward=True),
        lambda: mock.patch("tplora.adapter.gradients._begin"),
        "step 1: grad of .*lora_B",
    ),
    "stock dropout": (
        Case(dropout=0.3),
        lambda: mock.patch("tplora.adapter.layers.shard_dropout"),
        "step 1: loss|step 1: grad",
    ),
    "ranks that draw their own masks": (
        Case(dropout=0.3),
        lambda: mock.patch.object(ForwardSeed, "enter", return_value=None),
        "step 1: grad",
    ),
    "ranks that draw their own factors": (
        Case(),
        lambda: mock.patch("tests.models.attach_adapter", _attach_by_rank),
        ".*lora_A.default.weight before step 1",
    ),
    "foreign tokens not masked": (
        Case("ends"),
        lambda: mock.patch.object(TploraEmbedding, "forward", _foreign_tokens_not_masked),
        "step 1: loss 0",
    ),
    "a head that does not sum its input's gradient": (
        Case("ends"),
        lambda: mock.patch("tplora.adapter.head.defer.replicate_input", lambda x, _: x),
        "step 1: grad of .*(lora_embedding|o_proj)",
    ),
    "biases and norms of tokens left out of the bucket": (
        Case(is_cut=True, changes=TRAINED_ON_TOKENS),
        lambda: mock.patch("tplora.plan.build.with_token_gradients", _as_without_tokens),
        "step 1: grad of .*(input_layernorm|o_proj.base_layer.bias)",
    ),
    "gathered tokens that do not sum their gradient": (
        Case(is_cut=True),
        lambda: mock.patch(
            "tplora.collectives.shared_input.share_gathered", lambda _, whole, __: whole
        ),
        "step 1: grad of .*lora_B",
    ),
    "a residual dropout of each rank's own": (
        Case(dropout=0.3, is_cut=True),
        lambda: mock.patch.object(CutSequence, "_drop", _drop_own),
        "step 1: loss",
    ),
}
"""By what is broken: the run, how to break it, and a pattern of what is off."""
