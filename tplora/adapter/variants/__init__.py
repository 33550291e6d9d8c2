"""Kinds of LoRA that compute more than ``scaling * B A``, by the fields of PEFT's config.

PEFT asks a layer for this table; a kind that is not in it is refused when a run is planned.
"""

from tplora.adapter.variants.activated import ActivatedLora
from tplora.adapter.variants.block_diagonal import BlockDiagonal
from tplora.adapter.variants.dora import EmbeddingDora, LinearDora
from tplora.adapter.variants.local import LocalVariant, take_context
from tplora.adapter.variants.minor import EmbeddingMinor, LinearMinor
from tplora.adapter.variants.singular import SingularValues

__all__ = ["EMBEDDING_VARIANTS", "LINEAR_VARIANTS", "LocalVariant", "take_context"]

LINEAR_VARIANTS: dict[tuple[str, ...], type[LocalVariant] | None] = {
    (): None,
    ("use_dora",): LinearDora,
    ("use_bdlora",): BlockDiagonal,
    ("alora_invocation_tokens",): ActivatedLora,
    ("mica",): LinearMinor,
    ("kasa_config",): SingularValues,
}
EMBEDDING_VARIANTS: dict[tuple[str, ...], type[LocalVariant] | None] = {
    (): None,
    ("use_dora",): EmbeddingDora,
    ("mica",): EmbeddingMinor,
}
