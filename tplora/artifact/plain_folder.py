"""An adapter as plain PEFT reads it, whoever saved it: keys, file and config of today's form."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from tplora.artifact.adapter_dir import AdapterFiles
from tplora.saved.tensors import SAFE

__all__ = ["plain_folder", "write_plain"]


@contextlib.contextmanager
def plain_folder(adapter: AdapterFiles) -> Iterator[Path]:
    """The adapter's own folder where PEFT reads it as it is, else a copy that goes afterwards."""
    if adapter.tensors.is_plain and adapter.tensors.path.name == SAFE:
        yield adapter.folder
        return
    with tempfile.TemporaryDirectory(prefix="tplora-") as folder:
        write_plain(adapter, Path(folder))
        yield Path(folder)


def write_plain(adapter: AdapterFiles, folder: Path) -> None:
    """Write config and tensors in PEFT's own form to a folder that is there."""
    with adapter.tensors.open() as file:
        tensors = {key: file.tensor(key).contiguous() for key in file.keys()}  # noqa: SIM118
    save_file(tensors, folder / SAFE, metadata={"format": "pt"})
    adapter.config.save_pretrained(str(folder))
