"""Invariants of a whole model, each broken on purpose, and where parity must see it."""

from unittest import mock

import torch
import torch.nn.functional as F

from tests.models import Case
from tplora.adapter import attach
from tplora.adapter.dropout import ForwardSeed
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.gradients import GradientSync
from tplora.collectives import reduce_partial
from tplora.upstream import local_shard


def _foreign_tokens_not_masked(self, x, *_):
    rows = local_shard(self.get_base_layer().weight)
    start = self.mesh.get_local_rank() * rows.shape[0]
    own = (x - start).clamp(0, rows.shape[0] - 1)
    return reduce_partial(self._add_delta(F.embedding(own, rows), own), self.mesh.get_group())


def _attach_by_rank(model, config, *, seed):
    return attach.attach_adapter(model, config, seed=seed + torch.distributed.get_rank())


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
}
"""By what is broken: the run, how to break it, and a pattern of what is off."""
