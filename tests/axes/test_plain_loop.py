"""A plain loop over data axes: torch's own clipping, checkpointing of activations, generation."""

import pytest
import torch

from tests.axes.running import Mesh, load_on
from tests.models import CUT, InDouble, _enable_checkpointing, lora
from tests.tiny import VOCAB

pytestmark = pytest.mark.world

MESHES = [Mesh(tp_size=2, fsdp_size=2), Mesh(tp_size=2, dp_replicate_size=2)]


def _loop(mesh, path, checkpointing):
    """Two backward passes that add up, clipped; then a few tokens, the same rows on every rank."""
    model = load_on(mesh, path, lora())
    _enable_checkpointing(model, checkpointing)
    rows = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
    own = rows.chunk(mesh.data_size)[model.data.rank if model.data else 0]
    with InDouble():
        for _ in range(2):
            model(input_ids=own, labels=own).loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, 0.05)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    grads = {name: f.full_of(f.parameter.grad) for name, f in model.factors().items()}
    model.eval()
    with torch.no_grad():
        said = model.generate(input_ids=rows[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return float(norm), grads, said.tolist()


@pytest.mark.parametrize(
    "checkpointing",
    [None, "reentrant", "keeping", pytest.param("non-reentrant", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_plain_loop_is_that_of_one_process(world4, alone, checkpoint, mesh, checkpointing):
    path = checkpoint("llama", **CUT)
    norm, grads, said = alone.run(_loop, Mesh(), path, None)[0]
    for found_norm, found, found_said in world4.run(_loop, mesh, path, checkpointing):
        assert found_norm == pytest.approx(norm, rel=1e-12)
        assert found_said == said
        for name, grad in found.items():
            torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-14, msg=name)
