"""What an adapter was trained on, in a file beside PEFT's config, which names the base alone.

A base in 4 bits, or in another dtype, is another base: the record says how to have it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tplora.errors import ArtifactError
from tplora.saved.files import find_file, read_json
from tplora.upstream.quantization import quantized_on_its_way

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import BitsAndBytesConfig

    from tplora.adapter.model import TploraModel

__all__ = ["BASE_RECORD", "BaseRecord", "read_base_record", "write_base_record"]

BASE_RECORD = "base_model.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseRecord:
    """How a base was loaded when an adapter was trained on it. A value."""

    dtype: str
    """Of its weights, before any was quantised, such as "bfloat16"."""
    held_in: str
    """What a person calls it: the dtype, or "nf4 with double quantization"."""
    quantization: dict[str, Any] | None
    """What ``BitsAndBytesConfig`` took; None where nothing is quantised, or the checkpoint is."""

    @classmethod
    def of(cls, model: TploraModel) -> BaseRecord:
        """That of a model in memory."""
        plan, given = model.plan, quantized_on_its_way(model.get_base_model())
        return cls(
            dtype=plan.base_dtype,
            held_in=str(plan.quantization or plan.base_dtype),
            quantization=None if given is None else given.to_dict(),
        )

    @property
    def quantization_config(self) -> BitsAndBytesConfig | None:
        """What ``from_pretrained`` gets as that, or None."""
        if self.quantization is None:
            return None
        from transformers import BitsAndBytesConfig  # noqa: PLC0415  (slow, and not always needed)

        return BitsAndBytesConfig.from_dict(dict(self.quantization))

    @property
    def loading_code(self) -> tuple[str, ...]:
        """The lines of a call of ``BitsAndBytesConfig`` for a reader; none where it takes none."""
        config = self.quantization_config
        if config is None:
            return ()
        told = {"load_in_8bit": True} if config.load_in_8bit else {"load_in_4bit": True}
        told |= {k: v for k, v in config.to_diff_dict().items() if not k.startswith(("_", "load"))}
        told.pop("quant_method", None)
        return tuple(f"{name}={value!r}," for name, value in told.items())


def write_base_record(model: TploraModel, folder: Path) -> None:
    """Write the record; one rank."""
    record = BaseRecord.of(model)
    values = {
        "dtype": record.dtype,
        "held_in": record.held_in,
        "quantization_config": record.quantization,
    }
    (folder / BASE_RECORD).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check(record: BaseRecord) -> None:
    if not isinstance(getattr(torch, record.dtype, None), torch.dtype):
        raise ValueError(f"dtype {record.dtype!r}")
    record.quantization_config  # noqa: B018  (transformers refuses what is none)


def read_base_record(folder: Path) -> BaseRecord | None:
    """The record of an adapter's folder, or None of an adapter that another tool has saved.

    Raises:
        ArtifactError: If it is no record.
    """
    path = folder / BASE_RECORD
    if find_file(folder, [BASE_RECORD]) is None:
        return None
    values = read_json(path)
    try:
        record = BaseRecord(
            dtype=str(values["dtype"]),
            held_in=str(values["held_in"]),
            quantization=values["quantization_config"],
        )
        _check(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: does not say how the base was loaded ({type(error).__name__}: {error}); "
            "take a whole copy of the adapter"
        ) from error
    return record
