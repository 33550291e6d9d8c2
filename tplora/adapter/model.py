"""PEFT's model with factors that are cut like their layers; everything PEFT's users know works."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import (
    PeftModel,
    PeftModelForCausalLM,
    PeftModelForSequenceClassification,
    TaskType,
)

from tplora.adapter.base_record import BaseRecord
from tplora.adapter.card import card_text
from tplora.adapter.checkpointing import KEEP_REDUCED_OUTPUTS, enable_checkpointing
from tplora.adapter.combine import combined_config, fill_combined
from tplora.adapter.config import attach_config, file_config, with_layers_named
from tplora.adapter.data_axis import data_axis
from tplora.adapter.dropout import ForwardSeed
from tplora.adapter.frozen import run_on_pieces
from tplora.adapter.gradients import GradientSync
from tplora.adapter.head.defer import DefersLogits
from tplora.adapter.layers import ADAPTED, building_layers, cut_factors
from tplora.adapter.save import save_adapter
from tplora.adapter.sequence import cut_sequence
from tplora.adapter.sharded_base import check_sharded_base
from tplora.adapter.tokens import TploraTokens
from tplora.adapter.trained import building_trained, conflicts, cut_trained
from tplora.adapter.variants.singular import SingularValues
from tplora.collectives.shared_input import SharedInput
from tplora.errors import PlanError
from tplora.plan.beside import plan_beside
from tplora.plan.build import Plan, plan_layers
from tplora.plan.initial import alone_problem, changes_base
from tplora.plan.target import match_targets, without_adapter_parts
from tplora.upstream import auto_class, tp_mesh
from tplora.upstream.fsdp import enter_through_hooks, is_sharded_over_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from tplora.adapter.factor import Factor
    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["TploraModel", "model_class"]


class TploraModel(PeftModel):  # type: ignore[misc]
    """PEFT's model with factors cut like their layers.

    Everything PEFT's users know works on it. Build it with ``attach_adapter``, which takes the
    class of the config's task.

    Args:
        model: A base loaded with ``load_base``; edited in place.
        config: PEFT's config, used as it is.
        plan: The plan that was made for both.
        seed: Where the factors and the dropout masks come from.
        data_rank: This tp group's place on the data axes; the mesh says it when left out.
        overlap_communication: As in ``attach_adapter``, decided.
        kwargs: What PEFT's own constructor takes.
    """

    is_loaded_in_4bit = is_loaded_in_8bit = False
    """Said of the base only: trl's trainers would cast the factors of such a model to bfloat16."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: LoraConfig,
        *,
        plan: Plan,
        seed: int,
        data_rank: int | None = None,
        overlap_communication: bool = False,
        **kwargs: Any,
    ) -> None:
        mesh = tp_mesh(model)
        is_cut = mesh is not None and mesh.size() > 1
        shared_input = SharedInput(
            mesh.get_group() if mesh is not None and is_cut else None,
            is_waited_for_late=overlap_communication,
        )
        check_sharded_base(model, config, plan.layers, plan.trained)
        in_file = file_config(config, plan.layers, model)
        config = attach_config(config, plan.layers)
        with (
            building_layers(model, config, plan.layers, mesh, shared_input, seed),
            building_trained(model, plan.trained, mesh, shared_input),
        ):
            super().__init__(model, config, **kwargs)
        self.peft_config["default"] = in_file
        self.plan, self.mesh, self.seed = plan, mesh, seed
        self.card_facts: dict[str, str] = {}
        self.card_details: dict[str, str] = {}
        self.card_license: str | None = None
        self.data = data_axis(model, tp_size=plan.tp_size)
        self.sync = (
            None
            if mesh is None
            else GradientSync(
                mesh.get_group(), shared_input, self.data, is_overlapped=overlap_communication
            )
        )
        self._shared_input = shared_input
        self._beside: dict[str, dict[str, Factor]] = {}
        self._take_factors("default", plan.layers, plan.trained)
        run_on_pieces(self.get_base_model(), plan.facts, mesh, shared_input)
        if data_rank is None:
            data_rank = 0 if self.data is None else self.data.rank
        if is_sharded_over_data(model):
            enter_through_hooks(self.base_model, model)
        self._watch_root(ForwardSeed(seed, data_rank))
        self._cut_sequence = cut_sequence(self.get_base_model(), plan, mesh, shared_input)

    def _take_factors(
        self, adapter_name: str, layers: tuple[LayerPlan, ...], trained: tuple[TrainedPlan, ...]
    ) -> None:
        """Cut what PEFT has just built, and reduce its gradients from now on."""
        base = self.get_base_model()
        beside = list(cut_trained(base, adapter_name, trained, self.mesh, self._shared_input))
        self._beside[adapter_name] = {factor.name: factor for factor in beside}
        if self.peft_config[adapter_name].inference_mode:
            for factor in beside:  # PEFT marks biases all the same
                factor.parameter.requires_grad_(False)
        for factor in (*cut_factors(base, adapter_name, layers), *beside):
            if self.sync is not None:
                self.sync.add(factor)

    def add_adapter(self, adapter_name: str, peft_config: LoraConfig, **kwargs: Any) -> None:
        """PEFT's ``add_adapter``, with factors that are cut like their layers.

        Drawn from the model's seed and the adapter's name, so that no two adapters start alike.

        Raises:
            PlanError: A target that cannot be exact, by name.
        """
        problem = alone_problem(peft_config, self.peft_config.values())
        if problem:
            raise PlanError([problem])
        base, facts = self.get_base_model(), self.plan.facts
        targets = without_adapter_parts(match_targets(base, peft_config, facts), facts)
        layers = plan_layers(facts, peft_config, targets, tp_size=self.plan.tp_size, problems=[])
        trained, problems = plan_beside(facts, peft_config, layers, tp_size=self.plan.tp_size)
        if peft_config.bias != "none":
            problems.append(
                f"lora.bias = {peft_config.bias!r}: peft never trains the biases of an adapter "
                "that is added to a model; attach it as the first one"
            )
        problems += conflicts(base, layers, trained)
        if problems:
            raise PlanError(problems)
        if self._cut_sequence is not None:
            layers, trained = self._cut_sequence.planned(layers, trained)
        check_sharded_base(base, peft_config, layers, trained)
        peft_config = with_layers_named(peft_config, layers)
        seed = self.seed + zlib.crc32(adapter_name.encode())
        in_file = file_config(peft_config, layers, base)
        config = attach_config(peft_config, layers)
        with (
            building_layers(base, config, layers, self.mesh, self._shared_input, seed),
            building_trained(base, trained, self.mesh, self._shared_input),
        ):
            super().add_adapter(adapter_name, config, **kwargs)
        self.peft_config[adapter_name] = in_file
        self._take_factors(adapter_name, layers, trained)
        if self._cut_sequence is not None:
            self._cut_sequence.take_linears()

    def add_weighted_adapter(
        self, adapters: list[str], weights: list[float], adapter_name: str, **settings: Any
    ) -> None:
        """PEFT's ``add_weighted_adapter``, on full factors; the new adapter is cut like its layers.

        Collective: every rank calls it.

        Args:
            adapters: The adapters to combine; plain LoRA on modules.
            weights: One for each.
            adapter_name: What the new one is called.
            settings: PEFT's, such as ``combination_type``; as there, "svd" when left out.

        Raises:
            PlanError: If they cannot be combined.
        """
        settings |= {"weights": weights}
        config, whole = combined_config(self, adapters, adapter_name, settings)
        self.add_adapter(adapter_name, config)
        fill_combined(self, adapter_name, whole)

    def delete_adapter(self, adapter_name: str) -> None:
        """PEFT's ``delete_adapter``; its factors are no longer reduced, saved or used.

        Raises:
            PlanError: If the base would stay as the adapter's init or its biases have changed it.
        """
        config = self.peft_config[adapter_name]
        if changes_base(config) or config.bias != "none":
            raise PlanError(
                [
                    f"delete_adapter: {adapter_name!r} has changed the base's weights, which would "
                    "stay so; save it, and load the base anew"
                ]
            )
        names = list(self.factors(adapter_name))
        super().delete_adapter(adapter_name)
        if self.sync is not None:
            self.sync.remove(names)
        for module in self.modules():
            if isinstance(module, (*ADAPTED, TploraTokens)):
                module.factors.pop(adapter_name, None)
        self._beside.pop(adapter_name, None)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """The base's, as trainers call it; ``keep_reduced_outputs`` is a keyword of ours.

        Args:
            activation_checkpointing_kwargs: Of ``torch.utils.checkpoint.checkpoint``, and
                ``keep_reduced_outputs``: whether a layer's sums over ranks are kept, so that
                computing it again takes none of them again.
            settings: ``every_n_layers`` and ``offload``, as in transformers.

        Raises:
            PlanError: For ``keep_reduced_outputs`` with ``use_reentrant`` or a cut sequence.
        """
        keeps = (activation_checkpointing_kwargs or {}).get(KEEP_REDUCED_OUTPUTS)
        if keeps and self._cut_sequence is not None:
            raise PlanError(
                [
                    f"activation_checkpointing_kwargs: {KEEP_REDUCED_OUTPUTS} with "
                    "sequence_parallel, whose scattered sums are not kept; leave one of them out"
                ]
            )
        enable_checkpointing(self.get_base_model(), activation_checkpointing_kwargs, **settings)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """``activation_checkpointing_enable`` under its old name, by which trl's DPO calls it."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **settings)

    def _watch_root(self, forward_seed: ForwardSeed) -> None:
        """Hook the PEFT wrapper and the base: callers may enter through either."""
        self.forward_seed = forward_seed
        self.base_model.register_forward_pre_hook(forward_seed.enter)
        self.base_model.register_forward_hook(forward_seed.leave, always_call=True)
        self.defers_logits = DefersLogits(self.get_base_model())
        for root in (self.base_model, self.get_base_model()):
            root.register_forward_pre_hook(self.defers_logits.enter, with_kwargs=True)
            root.register_forward_hook(self.defers_logits.leave, always_call=True)
        if self.sync is not None:
            self.base_model.register_forward_hook(self.sync.watch_outputs)
            self.get_base_model().register_forward_hook(self.sync.watch_outputs)

    def factors(self, adapter_name: str = "default") -> dict[str, Factor]:
        """Every factor of one adapter by its parameter's name, sorted."""
        found = {
            factor.name: factor
            for module in self.modules()
            if isinstance(module, ADAPTED)
            for factor in module.factors.get(adapter_name, {}).values()
        }
        return dict(sorted((found | self._beside.get(adapter_name, {})).items()))

    def _get_kasa_loss(self, adapter_names: str | Sequence[str] | None = None) -> Any:
        """PEFT's: what KaSA adds to the loss, on cut factors. Collective where one is cut."""
        names = self.active_adapters if adapter_names is None else adapter_names
        total: Any = 0.0
        for name in [names] if isinstance(names, str) else names:
            config = self.peft_config[name].kasa_config
            for module in self.modules():
                variant = getattr(module, "lora_variant", {}).get(name)
                if isinstance(variant, SingularValues):
                    total = total + variant.regularization(module, name, config.beta, config.gamma)
        return total

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Tplora's own card, in the place where PEFT would write one of blanks."""
        loads = auto_class(self.get_base_model().config).__name__
        record = BaseRecord.of(self)
        facts = {"base held in": record.held_in} | self.card_facts
        text = card_text(
            self.peft_config["default"],
            facts,
            auto_class=loads,
            quantization=record.loading_code,
            details=self.card_details,
            license_name=self.card_license,
        )
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
            self, save_directory, adapter_names=selected_adapters, is_writer=is_main_process
        )


class TploraModelForCausalLM(TploraModel, PeftModelForCausalLM):  # type: ignore[misc]
    """For causal language modelling."""


class TploraModelForClassification(
    TploraModel,
    PeftModelForSequenceClassification,  # type: ignore[misc]
):
    """For classification of sequences; the score head is trained whole, as PEFT does."""


def model_class(config: LoraConfig) -> type[TploraModel]:
    """The class of PEFT for a config's task, of those that a plan takes."""
    is_classifier = config.task_type == TaskType.SEQ_CLS
    return TploraModelForClassification if is_classifier else TploraModelForCausalLM
