"""Private names of transformers' Trainer, trl and accelerate: refusals in the way, checkpoints."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate import ParallelismConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedModel, Trainer, TrainingArguments

__all__ = [
    "CpuParallelismConfig",
    "TakesTokenizedRows",
    "TrlFusedHead",
    "load_rng_file",
    "note_callback_states",
    "remove_old_checkpoints",
    "trainer_that_resumes",
    "trl_fused_head",
    "trl_without_head_check",
    "uploads_model",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlFusedHead:
    """What trl put on a model's ``forward``, and with which settings."""

    forward: Callable[..., Any]
    own_forward: Callable[..., Any]
    """The model's, which it replaced."""
    temperature: float
    outputs: tuple[str, ...]
    casts_head: bool
    output_class: type


def trl_fused_head(model: PreTrainedModel) -> TrlFusedHead | None:
    """trl's fused head on ``model.forward``, or None if that is not it.

    ``add_fused_lm_head`` (trl 1.16, trainer/utils.py) keeps temperature, outputs,
    cast_lm_head_to_fp32 and the forward it replaced in its closure and nowhere else.
    """
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    code = getattr(function, "__code__", None)
    if code is None or "final_logit_softcapping" not in code.co_freevars:
        return None
    cells = function.__closure__ or ()
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    return TrlFusedHead(
        forward=model.forward,
        own_forward=held["original_forward"],
        temperature=held["temperature"],
        outputs=held["outputs"],
        casts_head=held["cast_lm_head_to_fp32"],
        output_class=function.__globals__["FusedCausalLMOutput"],
    )


class CpuParallelismConfig(ParallelismConfig):  # type: ignore[misc]
    """accelerate's ``ParallelismConfig`` without the one check that refuses CPU processes.

    ``ParallelismConfig._validate_accelerator`` (accelerate 1.15) has no MULTI_CPU in its list,
    though everything behind it works on gloo. Only this check is skipped.
    """

    def _validate_accelerator(self, accelerator: Any) -> None:
        if self.total_size != accelerator.num_processes:
            super()._validate_accelerator(accelerator)


class TakesTokenizedRows:
    """Put before trl's DPOTrainer or KTOTrainer: rows that are tokens already stay as they are.

    ``_prepare_dataset`` (trl 1.16) knows no such rows, though SFTTrainer's and RewardTrainer's do.
    """

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if "prompt_ids" in (dataset.column_names or ()):
            return dataset
        parent: Any = super()
        return parent._prepare_dataset(dataset, *args, **kwargs)


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


@contextlib.contextmanager
def trainer_that_resumes(args: TrainingArguments | None) -> Iterator[None]:
    """Trainer is built, though it saves more than the weights of a model that is cut.

    ``Trainer.__init__`` (transformers 5.24, trainer.py:632) refuses that by ``save_only_model``,
    because its own way of saving the optimizer would keep one rank's pieces. Ours does not.
    """
    if args is None or args.save_only_model:
        yield
        return
    args.save_only_model = True
    try:
        yield
    finally:
        args.save_only_model = False


def uploads_model(trainer: Trainer) -> bool:
    """Whether a tracker saves the model by itself, on one rank, when training ends.

    ``WandbCallback._log_model`` (transformers 5.24), which the environment's WANDB_LOG_MODEL sets.
    """
    modes = (getattr(one, "_log_model", None) for one in trainer.callback_handler.callbacks)
    return any(getattr(mode, "is_enabled", False) for mode in modes)


def note_callback_states(trainer: Trainer) -> None:
    """Put the states of callbacks that have one into ``trainer.state``, as a checkpoint has them.

    The middle of ``Trainer._save_checkpoint`` (transformers 5.24).
    """
    from transformers.trainer_callback import ExportableState

    states: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    single = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    trainer.state.stateful_callbacks |= single


def remove_old_checkpoints(trainer: Trainer, folder: Path) -> None:
    """Keep ``save_total_limit`` checkpoints, the newest and the best among them.

    ``rotate_checkpoints`` (transformers 5.24, trainer_utils.py).
    """
    from transformers.trainer_utils import rotate_checkpoints

    rotate_checkpoints(
        output_dir=str(folder),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=trainer.state.best_model_checkpoint,
        use_mtime=True,
    )


def load_rng_file(path: Path) -> dict[str, Any]:
    """The states of the random generators that Trainer saves; numpy's needs a few names allowed.

    ``safe_globals`` (transformers 5.24, trainer_pt_utils.py).
    """
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        states: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return states
