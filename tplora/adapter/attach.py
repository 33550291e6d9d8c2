"""Put an adapter on a loaded model by its plan, and check what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from peft import TaskType

from tplora.adapter.model import model_class
from tplora.errors import PlanError, ShardError
from tplora.plan.build import Plan, plan_model
from tplora.upstream import tp_mesh

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.adapter.model import TploraModel

__all__ = ["attach_adapter"]


def attach_adapter(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    seed: int = 42,
    data_rank: int | None = None,
    plan: Plan | None = None,
    sequence_parallel: bool = False,
    autocast_adapter_dtype: bool = True,
    overlap_communication: bool | Literal["auto"] = "auto",
) -> TploraModel:
    """Freeze ``model``, put the adapter of ``config`` on it, and return PEFT's model around it.

    Only the factors are trainable afterwards, what the config trains beside LoRA's among them.

    Args:
        model: A base loaded with ``load_base``, or any model that transformers loaded with
            ``DistributedConfig(tp_size=...)``, or a plain one in one process.
        config: PEFT's config.
        seed: The same on every rank; the full factors are plain PEFT's after
            ``torch.manual_seed(seed)``.
        data_rank: This tp group's place on the data axes; the mesh says it when left out.
        plan: The plan made before loading; made here when left out.
        sequence_parallel: Whether the plan that is made here shares out the tokens between
            attention and MLP.
        autocast_adapter_dtype: As in PEFT: factors of a half-precision base are float32.
        overlap_communication: Whether factors' gradients are computed while the gradient of their
            input is summed; "auto" is where the model is on GPUs. The numbers are the same.

    Raises:
        PlanError: A target that cannot be exact, by name.
        ShardError: A weight on this rank is not the piece the plan says.
    """
    config.task_type = config.task_type or TaskType.CAUSAL_LM
    mesh = tp_mesh(model)
    tp_size = 1 if mesh is None else mesh.size()
    if plan is not None and sequence_parallel:
        raise PlanError(
            [
                "attach_adapter: sequence_parallel is settled by the plan that is given; leave one "
                "of the two out"
            ]
        )
    if plan is None:
        dtype = str(model.dtype).removeprefix("torch.")
        plan = plan_model(
            model,
            config,
            tp_size=tp_size,
            base_dtype=dtype,
            sequence_parallel=sequence_parallel,
        )
    if overlap_communication is True and plan.sequence is not None:
        raise PlanError(
            [
                "attach_adapter: overlap_communication = True with sequence_parallel, whose "
                "scattered sums are not overlapped; leave one of the two out"
            ]
        )
    attached = model_class(config)(
        model,
        config,
        plan=plan,
        seed=seed,
        data_rank=data_rank,
        autocast_adapter_dtype=autocast_adapter_dtype,
        overlap_communication=(
            model.device.type == "cuda"
            if overlap_communication == "auto"
            else overlap_communication
        ),
    )
    _check_trainable(attached)
    return attached


def _check_trainable(model: TploraModel) -> None:
    """Only factors are trainable, and all that the plan trains; for inference, nothing is."""
    expected = {name for name, factor in model.factors().items() if factor.plan.is_trained}
    if model.peft_config["default"].inference_mode:
        expected = set()
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if found != expected:
        wrong = sorted(found ^ expected)
        raise ShardError(
            f"{wrong[0]} and {len(wrong) - 1} more: trainable where only factors should be, or "
            "a factor that is not; attach to a model without other adapters"
        )
