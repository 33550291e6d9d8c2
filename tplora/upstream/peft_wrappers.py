"""Private names of peft: what it trains beside LoRA's factors, and what it takes for tied."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from peft import LoraConfig
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "building_token_layers",
    "embedding_name",
    "modules_saved_with_task",
    "names_tied_with_embedding",
    "saving_own_tokens",
]


@contextlib.contextmanager
def building_token_layers(build: Callable[..., nn.Module]) -> Iterator[None]:
    """While open, PEFT trains tokens with what ``build`` makes instead of its own layer.

    ``TrainableTokensWrapper.init_modules`` (peft 0.21, utils/other.py) looks
    ``peft.tuners.trainable_tokens.TrainableTokensLayer`` up each time it wraps a module.
    """
    from peft.tuners import trainable_tokens

    original = trainable_tokens.TrainableTokensLayer
    trainable_tokens.TrainableTokensLayer = build
    try:
        yield
    finally:
        trainable_tokens.TrainableTokensLayer = original


@contextlib.contextmanager
def saving_own_tokens() -> Iterator[None]:
    """While open, PEFT saves of each adapter the tokens that it has, beside others that have some.

    ``TrainableTokensWrapper.adapter_state_dict`` (peft 0.21, utils/other.py) asks every wrapped
    module for rows of every adapter, and fails for one that trains none there.
    """
    from peft.utils.other import TrainableTokensWrapper

    original = TrainableTokensWrapper.adapter_state_dict

    def own(self: Any, adapter_name: str, state_dict: dict[str, Any]) -> dict[str, Any]:
        held = self.token_adapter.trainable_tokens_delta
        return dict(original(self, adapter_name, state_dict)) if adapter_name in held else {}

    TrainableTokensWrapper.adapter_state_dict = own
    try:
        yield
    finally:
        TrainableTokensWrapper.adapter_state_dict = original


def embedding_name(model: PreTrainedModel) -> str | None:
    """The module whose tokens PEFT trains when ``trainable_token_indices`` is a list.

    ``_get_input_embeddings_name`` (peft 0.21, utils/other.py).
    """
    from peft.utils.other import _get_input_embeddings_name

    name: str | None = _get_input_embeddings_name(model)
    return name


def names_tied_with_embedding(model: PreTrainedModel) -> tuple[str, ...]:
    """The modules that PEFT takes to share the input embedding's weight.

    ``_get_module_names_tied_with_embedding`` (peft 0.21, utils/other.py).
    """
    from peft.utils.other import _get_module_names_tied_with_embedding

    return tuple(_get_module_names_tied_with_embedding(model))


def modules_saved_with_task(config: LoraConfig) -> tuple[str, ...]:
    """What PEFT adds to ``modules_to_save`` for the config's task: the heads of a classifier.

    ``PeftModelForSequenceClassification.__init__`` (peft 0.21, peft_model.py).
    """
    from peft import TaskType

    return ("classifier", "score") if config.task_type == TaskType.SEQ_CLS else ()
