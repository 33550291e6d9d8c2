"""Put an adapter on a loaded model by its plan: the only file that edits the model.

    build layers (PEFT draws full factors) -> cut them -> watch the root for gradients and dropout

PEFT builds the adapter as it does in one process, from one seed and with full sizes, so the full
factors are bit for bit those of plain PEFT after ``torch.manual_seed(seed)``, at every tp_size.
Then each factor is replaced by this rank's piece.
"""

from __future__ import annotations

import contextlib
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModelForCausalLM, TaskType
from torch import nn

from tplora.adapter.card import card_text
from tplora.adapter.dropout import ForwardSeed, ShardedDropout
from tplora.adapter.embedding import TploraEmbedding
from tplora.adapter.gradients import GradientSync
from tplora.adapter.linear import (
    ColumnParallelLoraLinear,
    ReplicatedLoraLinear,
    RowParallelLoraLinear,
    TploraLinear,
)
from tplora.adapter.save import save_adapter
from tplora.collectives import SharedInput
from tplora.errors import PlanError, ShardError
from tplora.plan.build import LayerPlan, Plan, plan_layers, plan_model
from tplora.plan.target import match_targets
from tplora.upstream import peft_without_tensor_parallelism, register_lora_layers, tp_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from tplora.adapter.factor import Factor

__all__ = ["TploraModel", "attach_adapter"]

_LINEAR_BY_CUT: dict[int | None, type[TploraLinear]] = {
    None: ReplicatedLoraLinear,
    0: ColumnParallelLoraLinear,
    1: RowParallelLoraLinear,
}


class TploraModel(PeftModelForCausalLM):  # type: ignore[misc]
    """PEFT's model for causal language modelling, with factors cut like their layers.

    Everything PEFT's users know works on it. Build it with ``attach_adapter``.

    Args:
        model: A base loaded with ``load_base``; edited in place.
        config: PEFT's config, used as it is.
        plan: The plan that was made for both.
        seed: Where the factors and the dropout masks come from.
        data_rank: This tp group's place on the data axes.
        kwargs: What PEFT's own constructor takes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoraConfig,
        *,
        plan: Plan,
        seed: int,
        data_rank: int = 0,
        **kwargs: Any,
    ) -> None:
        mesh = tp_mesh(model)
        shared_input = SharedInput(None if mesh is None else mesh.get_group())
        with _attaching(model, config, plan.layers, mesh, shared_input, seed):
            super().__init__(model, config, **kwargs)
        self.plan, self.mesh, self.seed = plan, mesh, seed
        self.card_facts: dict[str, str] = {}
        self.sync = None if mesh is None else GradientSync(mesh.get_group(), shared_input)
        self._shared_input = shared_input
        self._cut("default", plan.layers)
        self._watch_root(ForwardSeed(seed, data_rank))

    def _cut(self, adapter_name: str, layers: tuple[LayerPlan, ...]) -> None:
        """Replace the full factors of one adapter by this rank's pieces."""
        base = self.get_base_model()
        for plan in layers:
            module = base.get_submodule(plan.name)
            assert isinstance(module, TploraLinear | TploraEmbedding)
            _shard_dropout(module, adapter_name, plan)
            for factor in module.make_factors(adapter_name, f"base_model.model.{plan.name}", plan):
                if self.sync is not None:
                    self.sync.add(factor)

    def add_adapter(self, adapter_name: str, peft_config: LoraConfig, **kwargs: Any) -> None:
        """PEFT's ``add_adapter``, with factors that are cut like their layers.

        Drawn from the model's seed and the adapter's name, so that no two adapters start alike.

        Raises:
            PlanError: A target that cannot be exact, by name.
        """
        base, facts = self.get_base_model(), self.plan.facts
        known = {module.name for module in facts.modules}
        names = tuple(n for n in match_targets(base, peft_config, facts) if n in known)
        layers = plan_layers(facts, peft_config, names, tp_size=self.plan.tp_size, problems=[])
        seed = self.seed + zlib.crc32(adapter_name.encode())
        with _attaching(base, peft_config, layers, self.mesh, self._shared_input, seed):
            super().add_adapter(adapter_name, peft_config, **kwargs)
        self._cut(adapter_name, layers)

    def add_weighted_adapter(self, *args: Any, **kwargs: Any) -> None:
        """Refused: PEFT would combine this rank's pieces with full tensors.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            [
                "add_weighted_adapter: cannot be done on factors that are cut; save the adapters, "
                "combine them with plain PEFT in one process, and load_adapter the result"
            ]
        )

    def delete_adapter(self, adapter_name: str) -> None:
        """PEFT's ``delete_adapter``; its factors are no longer reduced, saved or used."""
        names = list(self.factors(adapter_name))
        super().delete_adapter(adapter_name)
        if self.sync is not None:
            self.sync.remove(names)
        for module in self.modules():
            if isinstance(module, TploraLinear | TploraEmbedding):
                module.factors.pop(adapter_name, None)

    def _watch_root(self, forward_seed: ForwardSeed) -> None:
        """Hook the PEFT wrapper and the base: callers may enter through either."""
        self.forward_seed = forward_seed
        self.base_model.register_forward_pre_hook(forward_seed.enter)
        self.base_model.register_forward_hook(forward_seed.leave, always_call=True)
        if self.sync is not None:
            self.base_model.register_forward_hook(self.sync.watch_outputs)
            self.get_base_model().register_forward_hook(self.sync.watch_outputs)

    def factors(self, adapter_name: str = "default") -> dict[str, Factor]:
        """Every factor of one adapter by its parameter's name, sorted."""
        found = {
            factor.name: factor
            for module in self.modules()
            if isinstance(module, TploraLinear | TploraEmbedding)
            for factor in module.factors.get(adapter_name, ())
        }
        return dict(sorted(found.items()))

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Tplora's own card, in the place where PEFT would write one of blanks."""
        text = card_text(self.peft_config["default"], self.card_facts)
        (Path(output_dir) / "README.md").write_text(text, encoding="utf-8")

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """A normal PEFT folder; see ``save_adapter``. Collective: every rank calls it."""
        if not safe_serialization:
            raise PlanError(
                ["save_pretrained: safe_serialization=False; only safetensors are written"]
            )
        kwargs.pop("state_dict", None)
        save_adapter(
            self,
            save_directory,
            adapter_names=selected_adapters,
            is_writer=is_main_process,
        )


@contextlib.contextmanager
def _attaching(
    model: PreTrainedModel,
    config: LoraConfig,
    layers: tuple[LayerPlan, ...],
    mesh: DeviceMesh | None,
    shared_input: SharedInput,
    seed: int,
) -> Iterator[None]:
    """While open, PEFT builds our layers, sees no mesh, and draws from ``seed`` alone."""
    plans = {layer.name: layer for layer in layers}

    def build_linear(target: nn.Module, adapter: str, *, target_name: str, **kw: Any) -> nn.Module:
        plan = plans[target_name]
        return _LINEAR_BY_CUT[plan.weight.shard_dim](
            target, adapter, plan=plan, mesh=mesh, shared_input=shared_input, **kw
        )

    def build_embedding(
        target: nn.Module, adapter: str, *, target_name: str, **kw: Any
    ) -> nn.Module:
        return TploraEmbedding(target, adapter, plan=plans[target_name], mesh=mesh, **kw)

    with (
        peft_without_tensor_parallelism(model),
        register_lora_layers(config, {nn.Linear: build_linear, nn.Embedding: build_embedding}),
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(seed)
        yield


def _shard_dropout(
    module: TploraLinear | TploraEmbedding, adapter_name: str, plan: LayerPlan
) -> None:
    """Swap PEFT's dropout for one whose masks do not depend on tp_size."""
    dropout = module.lora_dropout[adapter_name]
    if isinstance(dropout, nn.Dropout):
        is_input_cut = plan.a.shard_dim is not None
        module.lora_dropout[adapter_name] = ShardedDropout(
            dropout.p,
            in_features=plan.a.shape[1],
            mesh=module.mesh if is_input_cut else None,
        )


def attach_adapter(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    seed: int = 42,
    data_rank: int = 0,
    plan: Plan | None = None,
    autocast_adapter_dtype: bool = True,
) -> TploraModel:
    """Freeze ``model``, put the adapter of ``config`` on it, and return PEFT's model around it.

    Only the factors are trainable afterwards.

    Args:
        model: A base loaded with ``load_base``, or any model that transformers loaded with
            ``DistributedConfig(tp_size=...)``, or a plain one in one process.
        config: PEFT's config.
        seed: The same on every rank; the full factors are plain PEFT's after
            ``torch.manual_seed(seed)``.
        data_rank: This tp group's place on the data axes.
        plan: The plan made before loading; made here when left out.
        autocast_adapter_dtype: As in PEFT: factors of a half-precision base are float32.

    Raises:
        PlanError: A target that cannot be exact, by name.
        ShardError: A weight on this rank is not the piece the plan says.
    """
    config.task_type = config.task_type or TaskType.CAUSAL_LM
    mesh = tp_mesh(model)
    tp_size = 1 if mesh is None else mesh.size()
    if plan is None:
        dtype = str(model.dtype).removeprefix("torch.")
        plan = plan_model(model, config, tp_size=tp_size, base_dtype=dtype)
    attached = TploraModel(
        model,
        config,
        plan=plan,
        seed=seed,
        data_rank=data_rank,
        autocast_adapter_dtype=autocast_adapter_dtype,
    )
    _check_trainable(attached)
    return attached


def _check_trainable(model: TploraModel) -> None:
    """Only factors are trainable, and all of them are; for inference, nothing is."""
    is_trained = not model.peft_config["default"].inference_mode
    expected = set(model.factors()) if is_trained else set()
    found = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if found != expected:
        wrong = sorted(found ^ expected)
        raise ShardError(
            f"{wrong[0]} and {len(wrong) - 1} more: trainable where only factors should be, or "
            "a factor that is not; attach to a model without other adapters"
        )
