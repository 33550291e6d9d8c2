"""What a plan has to know of a model, read from its architecture on the meta device: no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from tplora.upstream import expanded_tp_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tplora.plan.style import Kind

__all__ = ["ModelFacts", "ModuleFacts", "read_facts"]

# A style on one of these cuts attention by heads (their output is not gathered).
_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """One module that has a two-dimensional weight of its own."""

    name: str
    type_name: str
    kind: Kind | None
    """None for a module that is neither a linear nor an embedding."""
    style: str | None
    weight_shape: tuple[int, ...]
    has_bias: bool
    has_plain_forward: bool
    """Whether it computes what torch's own class computes; a subclass may do more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's architecture as far as tensor parallelism and an adapter see it."""

    class_name: str
    model_type: str
    modules: tuple[ModuleFacts, ...]
    parameter_shapes: tuple[tuple[str, tuple[int, ...], str | None], ...]
    """Name, full shape and style of every parameter; tied parameters once."""
    has_tp_plan: bool
    num_heads: int | None
    num_kv_heads: int | None
    are_heads_cut: bool
    attention_dropout: float
    hidden_size: int
    vocab_size: int

    def module(self, name: str) -> ModuleFacts:
        """The module called ``name``."""
        return next(module for module in self.modules if module.name == name)


def read_facts(model: PreTrainedModel) -> ModelFacts:
    """Read the facts of a model whose parameters may be on the meta device."""
    config = model.config.get_text_config()
    styles = expanded_tp_plan(model)
    heads = getattr(config, "num_attention_heads", None)
    return ModelFacts(
        class_name=type(model).__name__,
        model_type=model.config.model_type,
        modules=tuple(
            _module_facts(name, module, styles.get(name))
            for name, module in model.named_modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ),
        parameter_shapes=tuple(
            (name, tuple(parameter.shape), styles.get(name))
            for name, parameter in model.named_parameters()
        ),
        has_tp_plan=bool(styles),
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        are_heads_cut=any(
            style == "colwise" and name.rpartition(".")[2] in _HEAD_PROJECTIONS
            for name, style in styles.items()
        ),
        attention_dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _module_facts(name: str, module: nn.Module, style: str | None) -> ModuleFacts:
    kind: Kind | None = None
    has_plain_forward = False
    if isinstance(module, nn.Linear):
        kind, has_plain_forward = "linear", type(module).forward is nn.Linear.forward
    elif isinstance(module, nn.Embedding):
        kind, has_plain_forward = "embedding", type(module).forward is nn.Embedding.forward
    return ModuleFacts(
        name=name,
        type_name=type(module).__name__,
        kind=kind,
        style=style,
        weight_shape=tuple(map(int, module.weight.shape)),  # type: ignore[arg-type]
        has_bias=getattr(module, "bias", None) is not None,
        has_plain_forward=has_plain_forward,
    )
