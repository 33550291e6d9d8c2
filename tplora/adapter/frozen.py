"""Cut linears and embeddings without an adapter, on this rank's pieces like those with one.

A style of transformers runs them on DTensors: right, but each such linear that reads a replicated
tensor sums its gradient by itself, and dispatch costs more than a small product. So they take the
forward of what is trained itself, of which here is nothing: the same collectives, one for all that
read the same tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tplora.adapter.local_module import LocalModule
from tplora.plan.trained import plan_part, runs_on_pieces
from tplora.upstream.quantization import is_quantized_linear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.facts import ModelFacts

__all__ = ["run_on_pieces"]


def run_on_pieces(
    base: PreTrainedModel, facts: ModelFacts, mesh: DeviceMesh | None, shared_input: SharedInput
) -> None:
    """Give each cut linear and embedding that nobody else runs its forward on local shards.

    Quantised ones have theirs since they were loaded.
    """
    for part in facts.parts:
        if mesh is None or not runs_on_pieces(part):
            continue
        module = base.get_submodule(part.name)
        is_own = isinstance(module, (nn.Linear, nn.Embedding)) and not is_quantized_linear(module)
        former = getattr(vars(module).get("forward"), "__self__", None)
        if is_own and not isinstance(former, LocalModule):
            plan = plan_part(part, "module", (), mesh.size())
            LocalModule(module, plan, {}, mesh, shared_input)
