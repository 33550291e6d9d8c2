"""A base's folder as it lies on disk: which file holds which tensor, and what lies beside them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PreTrainedModel

from tplora.artifact.tensor_file import Place, read_places
from tplora.errors import ArtifactError
from tplora.saved.files import check_file_name, parse_json

__all__ = [
    "INDEX",
    "SINGLE",
    "Checkpoint",
    "TiedPair",
    "find_base_folder",
    "read_checkpoint",
    "tied_pair",
]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py", "LICENSE*"]
_UNWANTED = ["consolidated*", "original/*"]  # the same weights in another layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Tensors by file."""

    folder: Path
    files: tuple[str, ...]
    tensors: Mapping[str, tuple[str, Place]]
    """Name of a tensor to the name of its file and its place there."""
    index: dict[str, Any] | None
    """The index as read; None when there is a single file."""

    @property
    def num_bytes(self) -> int:
        """Of all weight files."""
        return sum((self.folder / file).stat().st_size for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedPair:
    """Two names of one weight in the model."""

    embedding: str
    head: str


def find_base_folder(base: str, *, revision: str | None = None) -> Path:
    """``base`` if it is a folder, else the folder that the hub's repository is cached in.

    Raises:
        ArtifactError: If it is neither.
    """
    if Path(base).expanduser().is_dir():
        return Path(base).expanduser()
    try:
        return Path(
            snapshot_download(
                base, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ArtifactError(
            f"base {base!r}: no such folder, and the hub does not give it "
            f"({str(error).strip().partition(chr(10))[0]}); name the base's folder"
        ) from error


def read_checkpoint(folder: Path, *, may_be_packed: bool = False) -> Checkpoint:
    """Read the headers of all weight files of a base.

    Args:
        folder: Of the base.
        may_be_packed: Whether its weights may be quantised in the files.

    Raises:
        ArtifactError: If there are no safetensors, a file is missing, or the base is quantised.
    """
    config = _read_json(folder / "config.json")
    if config.get("quantization_config") and not may_be_packed:
        method = config["quantization_config"].get("quant_method", "quantised")
        raise ArtifactError(
            f"{folder}: the base's weights are packed ({method}); name the base in 16 or 32 bits"
        )
    index = None
    files: tuple[str, ...] = (SINGLE,)
    if not (folder / SINGLE).is_file():
        index = _read_json(folder / INDEX)
        files = _indexed_files(folder / INDEX, index)
    tensors = {}
    for file in files:
        if not (folder / file).is_file():
            raise ArtifactError(f"{folder}: {INDEX} names {file}, which is missing; get it again")
        places = read_places(folder / file)
        tensors.update({name: (file, place) for name, place in places.items()})
    return Checkpoint(folder=folder, files=files, tensors=tensors, index=index)


def _indexed_files(path: Path, index: dict[str, Any]) -> tuple[str, ...]:
    """The files that an index names; each lies beside it."""
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ArtifactError(f"{path}: has no weight_map; get it again")
    names = {check_file_name(name, where=str(path)) for name in table.values()}
    return tuple(sorted(names))


def tied_pair(model: PreTrainedModel) -> TiedPair | None:
    """The embedding and the head if the model makes them one weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight is not head.weight:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    return TiedPair(embedding=f"{names[id(embedding)]}.weight", head=f"{names[id(head)]}.weight")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        names = ", ".join(sorted(file.name for file in path.parent.iterdir())[:8]) or "nothing"
        raise ArtifactError(
            f"{path.parent}: holds no {path.name} but {names}; a folder with config.json and "
            "safetensors weights is needed"
        )
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{path}: is not JSON ({error}); get it again") from None
    if not isinstance(values, dict):
        raise ArtifactError(f"{path}: is no table; get it again")
    return values
