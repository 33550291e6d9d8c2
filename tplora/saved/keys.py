"""The key under which plain PEFT saves a tensor, for keys of other tools and of older versions.

    base_model.model.<module>.lora_A.weight            PEFT: saved without the adapter's name
    base_model.model.<module>.lora_A.default.weight    a model's own state_dict
    <module>.lora_A.weight                             transformers' save_pretrained of an adapter
    module. , model. , _orig_mod. ...                  DDP, trainers, torch.compile, FSDP around it
    base_model.model.base_model.model. ...             PEFT around PEFT

Only what stands around a module's name is changed, never the name.
"""

import re
from collections.abc import Iterable

from tplora.errors import ArtifactError
from tplora.saved.files import shown

__all__ = ["PREFIX", "plain_keys"]

PREFIX = "base_model.model."
_MAX_LENGTH = 1000
# Parts that wrappers put into the names of what they wrap.
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_OUTER = ("module.", "model.")  # DDP's and a trainer's own attribute, around PEFT's model
_FACTOR = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.|$)")
_NAMED = re.compile(r"\.lora_[AB]\.([^.]+)\.(?:weight|bias)$|\.lora_embedding_[AB]\.([^.]+)$")
_ENDS = (
    # ending with the adapter's name in it -> without
    (r"(\.lora_[AB])\.{name}(\.weight|\.bias)$", r"\1\2"),
    (r"(\.lora_embedding_[AB])\.{name}$", r"\1"),
    (r"(\.lora_magnitude_vector)\.{name}(\.weight)?$", r"\1"),
    (r"(\.trainable_tokens_delta)\.{name}$", r"\1"),
    (r"(\.modules_to_save)\.{name}(\.)", r"\1\2"),
)
_OLD_MAGNITUDE = ".lora_magnitude_vector.weight"


def plain_keys(keys: Iterable[str], *, where: str) -> dict[str, str]:
    """Each key of a file, and the one that plain PEFT gives to what it holds.

    Args:
        keys: Of one file.
        where: The file; for messages.

    Raises:
        ArtifactError: If a key is no name, two keys mean one tensor, or the file holds several
            adapters.
    """
    keys = list(keys)
    for key in keys:
        _check_name(key, where)
    inner = {key: _unwrapped(key) for key in keys}
    is_bare = not any(name.startswith(PREFIX) for name in inner.values()) and any(
        _FACTOR.search(name) for name in inner.values()
    )
    adapter = _adapter_name(inner.values(), where)
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for key, name in inner.items():
        plain = _plain_key(name, adapter, is_bare=is_bare)
        if plain in taken:
            raise ArtifactError(
                f"{where}: holds one tensor twice, as {shown(taken[plain])} and as "
                f"{shown(key)}; save the adapter again"
            )
        found[key], taken[plain] = plain, key
    return found


def _check_name(key: object, where: str) -> None:
    is_name = isinstance(key, str) and key.isprintable() and len(key) <= _MAX_LENGTH
    if not isinstance(key, str) or not is_name or set(key) & set("/\\") or "" in key.split("."):
        raise ArtifactError(
            f"{where}: a tensor is called {str(key)[:80]!r}, which is no parameter's name; save "
            "the adapter again"
        )


def _unwrapped(key: str) -> str:
    name = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    for outer in _OUTER * 2:
        if name.startswith(outer + PREFIX):
            name = name.removeprefix(outer)
    while name.startswith(PREFIX * 2):
        name = name.removeprefix(PREFIX)
    return name


def _adapter_name(names: Iterable[str], where: str) -> str | None:
    """The one that factors carry in their keys; None where they carry none."""
    matches = (_NAMED.search(name) for name in names)
    found = sorted({match[1] or match[2] for match in matches if match is not None})
    if len(found) > 1:
        raise ArtifactError(
            f"{where}: holds several adapters ({shown(', '.join(found))}); save each to a folder"
        )
    return found[0] if found else None


def _plain_key(name: str, adapter: str | None, *, is_bare: bool) -> str:
    is_prefixed = name.startswith(PREFIX)
    if not is_prefixed and _FACTOR.search(name):
        name = PREFIX + name.removeprefix("base_model.")
    elif not is_prefixed and is_bare and "." in name:
        name = PREFIX + name
    for end, plain in _ENDS:
        name = re.sub(end.format(name=re.escape(adapter or "default")), plain, name)
    return name.removesuffix(".weight") if name.endswith(_OLD_MAGNITUDE) else name
