"""A GGUF file turned into a plain transformers folder, once, in a cache."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tplora.errors import ArtifactError, SourceError
from tplora.files import written_aside

__all__ = ["Converted", "convert", "convert_once", "sha256_of"]

_KEPT_DTYPES = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What conversions become, and where they are kept."""

    dtype: torch.dtype
    cache: Path
    """One folder per source and key below it."""

    @classmethod
    def for_model(cls, *, dtype: str | None, cache_dir: str | None) -> "Converted":
        """float32 and float16 as asked, everything else bfloat16; the hub's assets cache, or ours.

        Raises:
            SourceError: If the cache folder cannot be made.
        """
        kept = _KEPT_DTYPES.get(str(dtype).removeprefix("torch."), torch.bfloat16)
        try:
            cache = cached_assets_path(
                "tplora",
                "gguf",
                str(kept).removeprefix("torch."),
                assets_dir=Path(cache_dir).expanduser() if cache_dir else None,
            )
        except OSError as error:
            raise SourceError(
                f"the cache for converted models cannot be made ({error}); "
                "make it writable or set model.cache_dir"
            ) from error
        return cls(dtype=kept, cache=cache)


def convert_once(
    fetch: Callable[[Path], Path],
    *,
    key: str,
    converted: Converted,
    progress: Callable[[str], None],
) -> Path:
    """The folder that a GGUF file was converted to, converting it if that has not been done yet.

    Of several processes one works, the others wait for it. Where the file system has no locks
    several may work; the first to finish is kept.

    Args:
        fetch: Gives the GGUF file; gets a scratch folder that is removed afterwards.
        key: What the result depends on: the file's sha256, or the wheel's.
        converted: The kind of result and its cache.
        progress: Called with one line before the conversion.

    Raises:
        SourceError: If the file cannot be converted or the cache cannot be written.
    """
    target = converted.cache / key
    if target.is_dir():
        return target
    try:
        with WeakFileLock(converted.cache / f"{key}.lock"):
            if not target.is_dir():
                with tempfile.TemporaryDirectory(prefix="scratch-", dir=converted.cache) as scratch:
                    file = fetch(Path(scratch))
                    progress(f"converting {file.name} to safetensors, once, in {target}")
                    _convert_into(target, file, converted.dtype)
    except OSError as error:
        raise SourceError(
            f"{converted.cache}: cannot be written ({error}); make it writable or set "
            "model.cache_dir"
        ) from error
    return target


def _convert_into(target: Path, file: Path, dtype: torch.dtype) -> None:
    try:
        with written_aside(target) as aside:
            convert(file, aside, dtype=dtype)
    except ArtifactError as error:
        if not target.is_dir():  # if it is, another process was first; whatever it wrote is whole
            raise SourceError(str(error)) from error


def convert(file: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write weights, configs, tokenizer and chat template of a GGUF file as a normal folder.

    Raises:
        SourceError: If transformers cannot read the file or what was written does not read back
            as the same architecture.
    """
    where = str(file.parent)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            where,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
        )
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file.name)
    except Exception as error:  # whatever a damaged or unknown file makes transformers raise
        raise SourceError(
            f"{file}: transformers cannot read this GGUF file "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); "
            "use a GGUF of an architecture it converts, or the model's safetensors"
        ) from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_converter_notes(folder)
    found = AutoConfig.from_pretrained(folder).model_type
    if found != model.config.model_type:
        raise SourceError(
            f"{file}: is {model.config.model_type!r} but its conversion reads back as {found!r}; "
            "use the model's safetensors"
        )


def _drop_converter_notes(folder: Path) -> None:
    """Take out what says how the files were read, not what they are (transformers 5.24)."""
    for name, keys in (
        ("config.json", ("_model_name_or_path",)),
        ("tokenizer_config.json", ("is_local", "local_files_only")),
    ):
        path = folder / name
        values = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in values.items() if key not in keys}
        path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_of(file: Path) -> str:
    """The file's sha256 in hexadecimal, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
