"""What a class with towers does with tokens before its text model, where a cut embedding breaks it.

Read in transformers 5.24; used by ``mends.py``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["give_inputs_of_layers"]


def give_inputs_of_layers(whole: Any, group: ProcessGroup) -> None:
    """Look up the inputs of each layer before the forward, which then does not make them itself.

    It would mix a row of the cut embedding with a plain tensor, for a value that is not read where
    there are token ids. Given embeddings, it asks for the places of images by their embeddings;
    they are known by their ids already.
    """
    if not whole.language_model.hidden_size_per_layer_input:
        return
    find_places = whole.get_placeholder_mask
    found: list[Any] = []

    def places(input_ids: Any = None, inputs_embeds: Any = None) -> Any:
        is_found = input_ids is None and found
        return found.pop() if is_found else find_places(input_ids, inputs_embeds)

    def look_up(module: Any, args: Any, given: dict[str, Any]) -> Any:
        found.clear()
        tokens = given.get("input_ids")
        if tokens is None:
            return None
        found.append(find_places(tokens))
        is_other = functools.reduce(torch.logical_or, found[0])
        tokens = tokens.masked_fill(is_other, module.config.text_config.pad_token_id)
        return args, given | {
            "input_ids": None,
            "inputs_embeds": module.get_input_embeddings()(tokens),
            "per_layer_inputs": module.language_model.get_per_layer_inputs(tokens),
        }

    whole.get_placeholder_mask = places
    whole.register_forward_pre_hook(look_up, with_kwargs=True)
