"""A live merge sends nothing, and the merged model is saved with every tensor sent once."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM

import tplora
from tests.adapter.models import load_plain, load_tplora, tokens
from tplora.errors import ArtifactError

pytestmark = pytest.mark.world


def _save_merged(path, folder, settings):
    model, plain = load_tplora(path, **settings).eval(), load_plain(path, **settings)
    with torch.no_grad():
        apart = model(input_ids=tokens()).logits
    with pytest.raises(ArtifactError, match=r"are not merged; call tplora\.merge_adapter"):
        tplora.save_merged(model, folder)
    with CommDebugMode() as seen:
        tplora.merge_adapter(model)
    assert seen.get_total_counts() == 0
    sent = mock.Mock(side_effect=dist.send)
    with CommDebugMode() as seen, mock.patch.object(dist, "send", sent):
        tplora.save_merged(model, folder, max_file_bytes=20_000)
    ops = {str(op) for op in seen.get_comm_counts()}
    assert not any("gather" in op or "reduce" in op for op in ops), ops  # by every rank
    cut = [p for p in model.get_base_model().parameters() if isinstance(p, DTensor)]
    cut = [p for p in cut if not p.placements[0].is_replicate() and p.requires_grad is False]
    wanted = 0 if dist.get_rank() == 0 else 3 * len({p._local_tensor.data_ptr() for p in cut})
    assert sent.call_count == wanted
    tplora.unmerge_adapter(model)
    with torch.no_grad():
        assert float((model(input_ids=tokens()).logits - apart).abs().max()) < 1e-10
    if dist.get_rank() == 0:
        merged = plain.merge_and_unload().state_dict()
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()
        assert found.keys() == merged.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("qwen2_tied", {"target_modules": ["q_proj", "down_proj"]}),
        ("phi3", {"target_modules": "all-linear"}),
    ],
)
def test_a_live_merge_is_saved_as_plain_peft_merges(world, checkpoint, tmp_path, name, settings):
    world.run(_save_merged, checkpoint(name), str(tmp_path / "out"), settings)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _save_over_a_file(path, folder):
    model = load_tplora(path)
    tplora.merge_adapter(model)
    with pytest.raises(ArtifactError, match="is a file, a folder is to be written there"):
        tplora.save_merged(model, folder)


def test_what_cannot_be_written_is_said_on_every_rank(world2, checkpoint, tmp_path):
    Path(tmp_path / "out").write_text("a file")
    world2.run(_save_over_a_file, checkpoint("llama"), str(tmp_path / "out"))
