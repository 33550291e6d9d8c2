"""A base that is given more tokens after it was cut: its rows are those of one process."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.parity import assert_is_shard
from tplora.base.load import load_base
from tplora.base.resize import resize_tokens
from tplora.errors import ShardError

pytestmark = pytest.mark.world

OLD, NEW, SEED = 127, 133, 5


def _resized(path, world_size):
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    torch.manual_seed(SEED)
    plain.resize_token_embeddings(NEW)
    torch.manual_seed(torch.distributed.get_rank())  # ranks differ, and it must not matter
    model = load_base(path, tp_size=world_size, dtype=torch.float64)
    resize_tokens(model, NEW, seed=SEED)
    return plain, model


def _equals_one_process(path, world_size):
    plain, model = _resized(path, world_size)
    for find in ("get_input_embeddings", "get_output_embeddings"):
        found, wanted = (getattr(one, find)().weight for one in (model, plain))
        assert not found.requires_grad
        assert isinstance(found, DTensor)
        dim = found.placements[0].dim
        assert_is_shard(shard=found, full=wanted, dim=dim, what=find, is_exact=True)
    assert model.config.vocab_size == NEW
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == plain.config.tie_word_embeddings
    tokens = torch.arange(NEW)[None]
    logits = model(input_ids=tokens).logits
    assert_is_shard(
        shard=logits, full=plain(input_ids=tokens).logits, dim=None, what="logits", atol=1e-6
    )
    return True


@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "phi3"])
def test_new_rows_and_logits_are_those_of_one_process(world, checkpoint, name):
    world.run(_equals_one_process, checkpoint(name), world.size)


def _too_few(path, world_size):
    model = load_base(path, tp_size=world_size, dtype=torch.float64)
    with pytest.raises(ShardError, match=f"has {OLD} tokens, 100 are asked for"):
        resize_tokens(model, 100, seed=SEED)


def test_a_vocabulary_is_never_made_smaller(world2, checkpoint):
    world2.run(_too_few, checkpoint("llama"), 2)
