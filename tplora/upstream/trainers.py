"""Private names of trl and accelerate: the fused head, and checks that stand in the way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from accelerate import ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

__all__ = [
    "CpuParallelismConfig",
    "trl_fused_head_settings",
    "trl_without_head_check",
]


def trl_fused_head_settings(forward: Callable[..., Any]) -> dict[str, Any] | None:
    """What trl's fused head was installed with, or None if ``forward`` is not that head.

    ``add_fused_lm_head`` (trl 1.16, trainer/utils.py) keeps temperature, outputs,
    cast_lm_head_to_fp32, final_logit_softcapping and logit_scale in its closure and nowhere else.
    """
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None or "final_logit_softcapping" not in code.co_freevars:
        return None
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


class CpuParallelismConfig(ParallelismConfig):  # type: ignore[misc]
    """accelerate's ``ParallelismConfig`` without the one check that refuses CPU processes.

    ``ParallelismConfig._validate_accelerator`` (accelerate 1.15) has no MULTI_CPU in its list,
    though everything behind it works on gloo. Only this check is skipped.
    """

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            super()._validate_accelerator(accelerator)


@contextlib.contextmanager
def trl_without_head_check(model: PreTrainedModel) -> Iterator[None]:
    """trl sees the frozen head below an adapted one, and builds its trainer.

    ``SFTTrainer.__init__`` (trl 1.16) refuses an adapter on the output embeddings, because its own
    fused head multiplies by ``lm_head.weight`` and would ignore the adapter. Ours does not.
    """
    head = model.get_output_embeddings()
    base_layer = getattr(head, "base_layer", None)
    if base_layer is None:
        yield
        return
    model.get_output_embeddings = lambda: base_layer
    try:
        yield
    finally:
        del model.get_output_embeddings
