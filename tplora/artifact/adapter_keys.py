"""What the keys of an adapter's file hold: factors, copies of the base, tokens, whole tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from tplora.upstream.peft_keys import is_second_copy

__all__ = ["AdapterKeys", "sort_keys"]

_PREFIX = "base_model.model."
# suffix of a key on disk -> which factor it is
_FACTORS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".lora_magnitude_vector": "magnitude",
    ".lora_B.bias": "bias",
}
_SAVED_BASE = ".base_layer.weight"
_TRAINED = ".modules_to_save."
_OF_TOKENS = ".token_adapter"
_TOKENS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKeys:
    """Every key of a file, by what it holds."""

    factors: dict[str, dict[str, str]]
    """Module to what a factor is, such as "A", to key."""
    saved_bases: dict[str, str]
    trained_tokens: dict[str, str]
    others: dict[str, str]


def sort_keys(shapes: Mapping[str, tuple[int, ...]]) -> AdapterKeys:
    """Say of each key what it holds."""
    keys = AdapterKeys(factors={}, saved_bases={}, trained_tokens={}, others={})
    for key in shapes:
        if is_second_copy(key, shapes):
            continue
        name = key.removeprefix(_PREFIX)
        suffix = next((end for end in _FACTORS if name.endswith(end)), None)
        if name == key:
            keys.others[key] = key
        elif suffix is not None:
            module = name.removesuffix(suffix)
            keys.factors.setdefault(module, {})[_FACTORS[suffix]] = key
        elif name.endswith(_SAVED_BASE):
            module = name.removesuffix(_SAVED_BASE).removesuffix(_OF_TOKENS)
            keys.saved_bases[module] = key
        elif name.endswith(_TOKENS):
            keys.trained_tokens[name.removesuffix(_TOKENS)] = key
        else:
            keys.others[name.replace(".base_layer.", ".").replace(_TRAINED, ".")] = key
    return keys
