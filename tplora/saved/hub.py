"""An adapter that is named as on the hub, ``owner/name``: its few files, fetched into the cache."""

from __future__ import annotations

from pathlib import Path

from tplora.errors import ArtifactError
from tplora.saved.files import shown

__all__ = ["fetch_adapter", "is_on_hub"]

# Never what another program would run; ``base_*`` is how the base was held, and which one it was.
_FILES = ["adapter_*", "base_*.json", "tokenizer*", "*.jinja", "*.model", "vocab.*", "merges.txt",
          "added_tokens.json", "special_tokens_map.json"]  # fmt: skip


def is_on_hub(named: str) -> bool:
    """Whether a name can only be the hub's: nothing is there, and nothing around it either."""
    path = Path(named).expanduser()
    looks_local = named.startswith((".", "/", "~")) or named.count("/") != 1
    return not (looks_local or path.exists() or path.parent.is_dir())


def fetch_adapter(named: str) -> Path:
    """The folder that the hub's cache keeps it in.

    Raises:
        ArtifactError: If the hub does not give it.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415  (a local adapter needs no hub)

    try:
        return Path(snapshot_download(named, allow_patterns=_FILES))
    except Exception as error:  # of the network too, whose library is the hub client's own choice
        said = shown(str(error).strip().partition("\n")[0])
        raise ArtifactError(
            f"{named}: no such folder, and the hub does not give it ({said}); name a run's or an "
            "adapter's folder, or log in with `hf auth login`"
        ) from None
