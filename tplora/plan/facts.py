"""What a plan has to know of a model, read from its architecture on the meta device: no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from tplora.upstream import (
    embedding_name,
    expanded_tp_plan,
    experts_implementation,
    names_tied_with_embedding,
)
from tplora.upstream.quantization import is_plain_linear, is_quantized_linear, weight_shape

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from tplora.plan.style import Kind

__all__ = [
    "ModelFacts",
    "ModuleFacts",
    "ParameterFacts",
    "PartFacts",
    "PartKind",
    "Role",
    "read_facts",
]

Role = Literal["linear", "head", "embedding", "experts", "router", "other"]
"""What a parameter is to a person who chooses what to adapt."""
PartKind = Literal["linear", "embedding", "norm", "router", "other"]

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
    """Whether it computes what torch's own class computes; a subclass may do more. An embedding may
    multiply by its ``embed_scale``, which peft knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFacts:
    """Any module, as something that may be trained itself."""

    name: str
    type_name: str
    kind: PartKind
    """A linear or an embedding computes what torch's own class does, or scales it."""
    style: str | None
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """Its own, not those of modules inside it."""
    is_container: bool
    has_buffers: bool
    """Whether it, or what is inside it, has buffers that belong to its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterFacts:
    """One parameter; tied ones are there once."""

    name: str
    shape: tuple[int, ...]
    style: str | None
    """Where it is cut."""
    module_style: str | None
    """What surrounds the forward of the module that owns it."""
    role: Role
    is_transposed: bool
    """Whether a stack of expert weights is ``[E, in, out]`` by its module's own word."""

    @property
    def module_name(self) -> str:
        """The module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        product = 1
        for size in self.shape:
            product *= size
        return product


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's architecture as far as tensor parallelism and an adapter see it."""

    class_name: str
    model_type: str
    text_type: str
    """The type of the text model inside; the same where there is nothing else."""
    modules: tuple[ModuleFacts, ...]
    parameters: tuple[ParameterFacts, ...]
    parts: tuple[PartFacts, ...]
    """Every module, however it is called."""
    embedding: str | None
    """The input embedding."""
    tied: tuple[str, ...]
    """Modules that share the input embedding's weight."""
    has_tp_plan: bool
    styles: tuple[tuple[str, str], ...]
    """Name and style of everything that transformers will cut or wrap."""
    foreign_styles: tuple[tuple[str, str | None], ...]
    """Where the plan is not the class's own, but one that somebody gave."""
    heads: tuple[tuple[int, int], ...]
    """Attention heads and key-value heads, each pair that some layer has."""
    are_heads_cut: bool
    experts_implementation: str | None
    """The kernel that the experts run with, by transformers' name."""
    attention_dropout: float
    hidden_size: int
    vocab_size: int

    def module(self, name: str) -> ModuleFacts:
        """The module called ``name``."""
        return next(module for module in self.modules if module.name == name)

    def part(self, name: str) -> PartFacts:
        """Any module by its name."""
        return next(part for part in self.parts if part.name == name)

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return bool(self.tied)

    def with_role(self, role: Role) -> tuple[ParameterFacts, ...]:
        """Every parameter of that role."""
        return tuple(parameter for parameter in self.parameters if parameter.role == role)


def read_facts(model: PreTrainedModel) -> ModelFacts:
    """Read the facts of a model whose parameters may be on the meta device."""
    config = model.config.get_text_config()
    styles, own = expanded_tp_plan(model), expanded_tp_plan(model, is_own=True)
    return ModelFacts(
        class_name=type(model).__name__,
        model_type=model.config.model_type,
        text_type=model.config.get_text_config(decoder=True).model_type,
        modules=tuple(
            _module_facts(name, module, styles.get(name))
            for name, module in model.named_modules()
            if getattr(getattr(module, "weight", None), "ndim", 0) == 2
        ),
        parameters=_parameters(model, styles),
        parts=tuple(
            _part_facts(name, module, styles.get(name))
            for name, module in model.named_modules()
            if name
        ),
        embedding=embedding_name(model),
        tied=names_tied_with_embedding(model),
        has_tp_plan=bool(styles),
        styles=tuple(styles.items()),
        foreign_styles=tuple(
            (name, styles.get(name))
            for name in sorted({*styles, *own})
            if styles.get(name) != own.get(name)
        ),
        heads=_heads(config),
        are_heads_cut=any(
            style == "colwise" and name.rpartition(".")[2] in _HEAD_PROJECTIONS
            for name, style in styles.items()
        ),
        experts_implementation=experts_implementation(model),
        attention_dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def _module_facts(name: str, module: nn.Module, style: str | None) -> ModuleFacts:
    kind: Kind | None = None
    has_plain_forward = False
    if isinstance(module, nn.Linear):
        kind, has_plain_forward = "linear", is_plain_linear(module)
    elif isinstance(module, nn.Embedding):
        is_plain = type(module).forward is nn.Embedding.forward
        kind, has_plain_forward = "embedding", is_plain or hasattr(module, "embed_scale")
    return ModuleFacts(
        name=name,
        type_name=type(module).__name__,
        kind=kind,
        style=style,
        weight_shape=weight_shape(module, "weight"),
        has_bias=getattr(module, "bias", None) is not None,
        has_plain_forward=has_plain_forward,
    )


def _part_facts(name: str, module: nn.Module, style: str | None) -> PartFacts:
    is_container = next(module.children(), None) is not None
    kind: PartKind = "other"
    if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
        facts = _module_facts(name, module, style)
        if facts.has_plain_forward:
            kind = "linear" if facts.kind == "linear" else "embedding"
        elif not is_container and _is_router(name.rpartition(".")[2], module):
            kind = "router"
    if not is_container and "norm" in type(module).__name__.lower():
        kind = "norm"
    state = module.state_dict(keep_vars=True).values()
    return PartFacts(
        name=name,
        type_name=type(module).__name__,
        kind=kind,
        style=style,
        parameters=tuple(
            (leaf, weight_shape(module, leaf)) for leaf, _ in module.named_parameters(recurse=False)
        ),
        is_container=is_container,
        has_buffers=any(not isinstance(tensor, nn.Parameter) for tensor in state),
    )


def _heads(config: PretrainedConfig) -> tuple[tuple[int, int], ...]:
    """Head counts are a config's own or its layers', and those of sliding windows beside them."""
    layers = config.per_layer_config if config.is_heterogeneous else [config]
    found = set()
    for layer in layers:
        for prefix in ("", "swa_"):
            heads = getattr(layer, f"{prefix}num_attention_heads", None)
            by_layer = getattr(layer, f"{prefix}num_attention_heads_per_layer", None) or [heads]
            kv_heads = getattr(layer, f"{prefix}num_key_value_heads", None)
            found |= {(one, kv_heads or one) for one in by_layer if one}
    return tuple(sorted(found))


def _parameters(model: PreTrainedModel, styles: dict[str, str]) -> tuple[ParameterFacts, ...]:
    head = model.get_output_embeddings()
    seen: set[int] = set()
    found = []
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{leaf}" if module_name else leaf
            found.append(
                ParameterFacts(
                    name=name,
                    shape=weight_shape(module, leaf),
                    style=styles.get(name),
                    module_style=styles.get(module_name),
                    role="head" if module is head else _role(module_name, module, leaf, parameter),
                    is_transposed=bool(getattr(module, "is_transposed", False)),
                )
            )
    return tuple(found)


def _role(module_name: str, module: nn.Module, leaf: str, parameter: nn.Parameter) -> Role:
    last = module_name.rpartition(".")[2]
    if is_quantized_linear(module):
        return "linear" if leaf == "weight" else "other"
    if parameter.ndim == 3:
        is_stack = "experts" in last and not isinstance(module, nn.Conv1d)
        return "experts" if is_stack else "other"
    if parameter.ndim != 2 or leaf != "weight":
        return "other"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if _is_router(last, module):
        return "router"
    return "linear" if isinstance(module, nn.Linear) else "other"


def _is_router(last: str, module: nn.Module) -> bool:
    """Whether a module chooses experts: a class of its own, whose forward returns the choice."""
    return not is_plain_linear(module) and (
        last in ("gate", "router") or "router" in type(module).__name__.lower()
    )
