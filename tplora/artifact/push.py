"""An adapter or a merged model on the hub: its files alone, private unless asked, whole or not.

One commit holds everything, so nobody sees a half. What leaves this machine names none of its
paths: a base that is a local folder goes out as that folder's name.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from tplora.adapter.card import is_hub_id, public_name
from tplora.errors import ArtifactError, HubError
from tplora.saved.config import CONFIG
from tplora.saved.files import find_file, read_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["check_hub", "check_repo", "push_folder"]

# Of a folder, what a model is; no optimizer's state, no rows, no log.
_FILES = (
    "adapter_config.json", "adapter_model*.safetensors", "base_model.json", "base_fingerprint.json",
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template.*", "processor_config.json", "preprocessor_config.json", "LICENSE*",
    "README.md", "*.gguf",
)  # fmt: skip


def push_folder(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    endpoint: str | None = None,
    token: str | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> str:
    """Upload a folder's model files in one commit; the address of the repository.

    Args:
        folder: Of an adapter, or of a merged model.
        repo: ``owner/name``; made if it is not there.
        private: Whether only its owner sees it. A repository that is there has to be so already.
        endpoint: Of the hub; ``HF_ENDPOINT`` or the public one when left out.
        token: The user's own, from ``hf auth login`` or ``HF_TOKEN``, when left out.
        progress: Called with one line before the upload.

    Raises:
        ArtifactError: If the folder holds no model, or its card names a path or is not valid.
        HubError: If the repository is public and was to be private, or the hub does not take it;
            the folder is as it was.
    """
    check_repo(repo, where="push")
    files = _files(folder)
    _check_card(folder / "README.md")
    api = HfApi(endpoint=endpoint, token=token)
    public = "" if private else " --public"
    again = f", then `tplora push {shlex.quote(str(folder))} {repo}{public}`: {folder} is whole"
    with _said_by_hub(repo, token, again=again):
        url = api.create_repo(repo, private=private, exist_ok=True)
        _check_private(api, repo, private=private)
        progress(f"uploading {len(files)} files to {repo}")
        api.create_commit(
            repo, [_operation(path) for path in files], commit_message="Upload with tplora"
        )
    return str(url)


def check_hub(
    repo: str, *, private: bool = True, endpoint: str | None = None, token: str | None = None
) -> None:
    """Ask the hub, hours before the upload, what can be known then; creates nothing there.

    The arguments are ``push_folder``'s.

    Raises:
        HubError: If it cannot be reached, does not know the token, or the repository is public and
            was to be private.
    """
    api = HfApi(endpoint=endpoint, token=token)
    with _said_by_hub(repo, token):
        api.whoami()
        try:
            _check_private(api, repo, private=private)
        except RepositoryNotFoundError:
            return


def _check_private(api: HfApi, repo: str, *, private: bool) -> None:
    if private and api.model_info(repo).private is False:
        raise HubError(
            f"{repo}: is there already and everybody sees it; name another one, make it private, "
            "or ask for a public one"
        )


@contextlib.contextmanager
def _said_by_hub(repo: str, token: str | bool | None, *, again: str = "") -> Iterator[None]:
    """What huggingface_hub raises, as one line of ours; no token stands in it."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:  # of the network too, whose library is the hub client's own choice
        said = " ".join(str(error).split())
        for secret in (token, get_token()):
            if isinstance(secret, str) and secret:
                said = said.replace(secret, "...")
        raise HubError(
            f"{repo}: the hub does not take it ({said[:300]}); log in with `hf auth login`, or see "
            f"that the network and HF_ENDPOINT are right{again}"
        ) from None


def check_repo(repo: str, *, where: str) -> None:
    """Refuse what cannot be a repository's name.

    Raises:
        ArtifactError: If it is not ``owner/name``.
    """
    if not is_hub_id(repo):
        raise ArtifactError(f"{where}: {repo!r} is no repository; write OWNER/NAME")


def _files(folder: Path) -> list[Path]:
    found = sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()})
    names = {path.name for path in found}
    for path in found:
        find_file(folder, [path.name])
    if not {CONFIG, "config.json"} & names or not any(
        path.suffix in (".safetensors", ".gguf") for path in found
    ):
        raise ArtifactError(
            f"{folder}: holds no adapter and no model; name an adapter's folder, a run's or a "
            "merged model's"
        )
    return found


def _operation(path: Path) -> CommitOperationAdd:
    content: Path | bytes = path
    if path.name == CONFIG:
        values = read_json(path)
        name = values.get("base_model_name_or_path")
        if isinstance(name, str):
            values["base_model_name_or_path"] = public_name(name)
            content = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
    source = content if isinstance(content, bytes) else str(content)
    return CommitOperationAdd(path_in_repo=path.name, path_or_fileobj=source)


def _check_card(path: Path) -> None:
    if not path.is_file():
        return
    text = path.read_text(encoding="utf-8")
    try:
        ModelCard(text)
    except ValueError as error:
        raise ArtifactError(f"{path}: has no valid front matter ({error}); mend it") from None
    named = next((line for line in text.splitlines() if str(path.parent.resolve()) in line), None)
    if named is not None:
        raise ArtifactError(f"{path}: names a path of this machine ({named[:80]!r}); take it out")
