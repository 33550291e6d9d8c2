"""A merge whose result is one GGUF file: into a folder beside it, which is then written as that."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig

from tplora.artifact.checkpoint import find_base_folder
from tplora.artifact.gguf_model import check_gguf_model, write_gguf_model
from tplora.artifact.gguf_vocab import check_vocabulary
from tplora.errors import ArtifactError
from tplora.run.export import find_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["gguf_scratch"]


@contextlib.contextmanager
def gguf_scratch(
    named: str, out: Path, *, base: str | None, overwrite: bool, push: str | None
) -> Iterator[Path]:
    """Yield the folder to merge into; when the block ends well it becomes the file ``out``.

    What can be known is refused before anything is merged.

    Raises:
        ArtifactError: If something is there and may not be replaced, the base is none that is
            written as GGUF, or the result is to be pushed.
    """
    if push is not None:
        raise ArtifactError(
            f"--push-to-hub {push}: pushes a merged folder; name a folder, not {out}"
        )
    if os.path.lexists(out) and not overwrite:
        raise ArtifactError(f"{out}: exists already; ask to overwrite it or name another place")
    parts = find_parts(named, base=base)
    found = parts.base
    config = AutoConfig.from_pretrained(found.path, revision=found.revision)
    check_gguf_model(found.path, config)
    has_own = (parts.adapter / "tokenizer_config.json").is_file()  # then that goes into the result
    check_vocabulary(
        parts.adapter if has_own else find_base_folder(found.path, revision=found.revision)
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".merged-", dir=out.parent) as scratch:
        yield Path(scratch, "model")
        write_gguf_model(Path(scratch, "model"), out, overwrite=overwrite)
