"""What a conversion would change is refused by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.artifact.mergeable import field_beyond_matrices
from tplora.errors import ArtifactError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tplora.artifact.convert.layers import LoadedAdapter

__all__ = ["check_convertible", "check_plain_layers"]

# Leave what is merged as it is, and mean a shape, names or the whole of A and B.
_MEANING_SHAPES = ("use_bdlora", "kasa_config", "use_qalora", "alora_invocation_tokens",
                   "arrow_config", "monteclora_config")  # fmt: skip
# Says how the base stores its weights, which is nothing to A and B.
_MEANING_THE_BASE = ("fan_in_fan_out",)


def check_convertible(adapter: LoadedAdapter, what: str) -> None:
    """Refuse an adapter of which layers are more than A, B, DoRA's vector and a bias of B.

    Raises:
        ArtifactError: With the field of the config.
    """
    field = field_beyond_matrices(adapter.config, but=_MEANING_THE_BASE)
    field = field or next((one for one in _MEANING_SHAPES if getattr(adapter.config, one)), None)
    if field is not None:
        raise ArtifactError(
            f"{adapter.folder}/adapter_config.json: {field} = "
            f"{getattr(adapter.config, field)!r}, with which {what} changes what the adapter "
            "computes; leave that out, or train a new adapter"
        )


def check_plain_layers(adapters: Sequence[LoadedAdapter], what: str) -> None:
    """Refuse DoRA and a bias of B, whose effect is not that of a delta weight.

    Raises:
        ArtifactError: With the module.
    """
    for adapter in adapters:
        for module, layer in adapter.layers.items():
            found = "a magnitude of DoRA" if layer.magnitude is not None else None
            found = found or ("a bias of B" if layer.bias is not None else None)
            if found:
                raise ArtifactError(
                    f"{adapter.folder}: {module} has {found}, which {what} cannot keep exactly; "
                    "merge the adapter into its base instead: tplora export"
                )
