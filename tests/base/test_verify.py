"""A base whose gathered weights are not the checkpoint's is refused on every rank, by name."""

import contextlib
import json
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.zoo.build import architectures, build_model
from tests.zoo.multimodal import write_checkpoint
from tplora.base import load, mends, sample, verify
from tplora.base.checkpoint_files import find_safetensors
from tplora.base.load import load_base
from tplora.base.verify import check_against_checkpoint
from tplora.errors import ShardError
from tplora.upstream import local_shard, tp_mesh

OPTIONS = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(model_type)`` is the path of a tiny checkpoint in float32, written once."""
    folder, written = tmp_path_factory.mktemp("checkpoints"), {}

    def get(model_type):
        if model_type not in written:
            written[model_type] = str(folder / model_type)
            build_model(model_type).save_pretrained(written[model_type])
        return written[model_type]

    return get


@contextlib.contextmanager
def _set(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _unmended(path: str) -> None:
    with (
        _set(mends, "MENDS", {}),
        pytest.raises(ShardError, match=r"attn\.gqkv_proj\.weight: what the ranks hold of it"),
    ):
        load_base(path, tp_size=2, **OPTIONS)


@pytest.mark.world
def test_weights_that_transformers_loads_wrongly_are_seen(world2, saved):
    world2.run(_unmended, saved("hrm_text"))


def _check(model, path):
    check_against_checkpoint(model, path, OPTIONS, tp_mesh(model).get_group())


def _changed(path: str, name: str, named: str, rank: int) -> None:
    model = load_base(path, tp_size=dist.get_world_size(), **OPTIONS)
    _check(model, path)
    shard = local_shard(model.get_parameter(name).data)
    if dist.get_rank() == rank:
        shard.view(-1)[-1] += 1
    with pytest.raises(ShardError, match=named.replace(".", r"\.")):
        _check(model, path)


@pytest.mark.world
@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
    ],
)
def test_one_number_on_the_last_rank_is_seen(world, saved, name):
    world.run(_changed, saved("qwen3_moe"), name, name, 1)


@pytest.mark.world
@pytest.mark.parametrize(("name", "named"), [("gate_up_proj", "3.up_proj"), ("down_proj",) * 2])
def test_so_it_is_in_experts_that_the_checkpoint_has_one_by_one(world, saved, name, named):
    experts = "model.layers.1.mlp.experts."
    world.run(_changed, saved("qwen3_moe"), experts + name, named, 0)


def _exchanged(path: str) -> None:
    """Both halves are right, but not where the placement says."""
    model = load_base(path, tp_size=2, **OPTIONS)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(weight, DTensor)
    shard = local_shard(weight.data)
    shard.copy_(torch.cat(shard.chunk(2, dim=1)[::-1], dim=1))
    with pytest.raises(ShardError, match=r"layers\.0\.mlp\.experts\.0\.\w+_proj\.weight"):
        _check(model, path)


@pytest.mark.world
def test_gate_and_up_the_other_way_round_are_seen(world2, saved):
    world2.run(_exchanged, saved("qwen3_moe"))


def _in_parts(path: str) -> list[int]:
    """Compare at most 2 kB of each weight; give what this rank compared."""
    sizes = []

    def count(model, weights, *others):
        sizes.extend(weight.numel() * weight.element_size() for weight in weights.values())
        return difference(model, weights, *others)

    difference = verify._difference
    with _set(sample, "_LARGE_BYTES", 2048), _set(verify, "_difference", count):
        model = load_base(path, tp_size=2, **OPTIONS)
        weights = dict(model.named_parameters())
        name = next(name for name in weights if name.endswith("o_proj.weight"))
        if dist.get_rank() == 1:
            local_shard(weights[name].data)[:1, -1:] += 1
        with pytest.raises(ShardError, match=r"layers\.0\.\w+\.o_proj\.weight"):
            _check(model, path)
    return sizes


@pytest.mark.world
@pytest.mark.parametrize("model_type", ["llama4_text", "mixtral", "qwen3_moe", "hrm_text"])
def test_of_large_weights_a_part_is_compared(world2, saved, model_type):
    first, second = world2.run(_in_parts, saved(model_type))
    assert first, "both compare"
    assert second
    sizes = first + second
    whole = [weight.numel() * 4 for weight in build_model(model_type).parameters()]
    if model_type != "hrm_text":  # what falls out of a fused weight is compared whole
        assert max(sizes) < max(whole) / 4


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_weights", [3, 21, 300])
@pytest.mark.parametrize("num_together", [1, 3])
def test_no_rank_compares_more_than_a_tenth_of_what_it_holds(num_weights, num_ranks, num_together):
    held, names = 4 << 30, [str(number) for number in range(num_weights)]
    joined = [names[at : at + num_together] for at in range(0, num_weights, num_together)]
    size = sample.part_bytes(held, joined, num_ranks)
    owners = sample.divide(joined, dict.fromkeys(names, (size,)), num_ranks)
    assert owners.keys() == set(names)
    assert all(len({owners[name] for name in one}) == 1 for one in joined)
    assert max(Counter(owners.values()).values()) * size <= held / 10


def _small_parts(path: str) -> None:
    with _set(sample, "_LARGE_BYTES", 64):
        load_base(path, tp_size=2, **OPTIONS)


@pytest.mark.world
def test_weights_that_fuse_in_the_checkpoint_are_cut_short_alike(world2, saved):
    world2.run(_small_parts, saved("lara_mini"))


@pytest.mark.world
@pytest.mark.slow
@pytest.mark.parametrize("model_type", architectures())
def test_parts_of_every_architecture_are_parts_of_what_it_was_loaded_from(
    world2, saved, model_type
):
    world2.run(_small_parts, saved(model_type))


def _unreadable(path: str) -> None:
    with (
        _set(verify, "find_safetensors", lambda *args: {"lm_head.weight": "nowhere"}),
        pytest.raises(ShardError, match=r"cannot be compared with it \(\w+: .*tp_size = 1"),
    ):
        load_base(path, tp_size=2, **OPTIONS)


@pytest.mark.world
def test_a_checkpoint_that_cannot_be_read_again_is_said_on_every_rank(world2, saved):
    world2.run(_unreadable, saved("qwen3"))


def _loads(path: str) -> list[str]:
    compared = []

    def note(model, weights, there, files):
        compared.extend(weights.keys() & there.keys())
        return difference(model, weights, there, files)

    difference = verify._difference
    with _set(verify, "_difference", note):
        load_base(path, tp_size=2, **OPTIONS)
    return compared


def _compared(world, path):
    found = world.run(_loads, path)
    assert all(found), "each rank compares some"
    names = [name for names in found for name in names]
    assert len(set(names)) == len(names), "and no two the same"
    return names


@pytest.mark.world
def test_a_text_model_is_held_to_the_whole_class_that_it_was_saved_in(world2, tmp_path):
    compared = _compared(world2, write_checkpoint("llama4", tmp_path))
    assert "model.layers.0.self_attn.q_proj.weight" in compared


def _nothing_found(path: str) -> None:
    with (
        _set(verify, "find_safetensors", lambda *args: {"other": "nowhere"}),
        pytest.raises(ShardError, match=r"cannot be compared .*it has none of "),
    ):
        load_base(path, tp_size=2, **OPTIONS)


@pytest.mark.world
def test_a_checkpoint_without_any_of_the_names_is_refused(world2, saved):
    world2.run(_nothing_found, saved("qwen3"))


@pytest.mark.world
def test_a_model_without_its_head_in_the_checkpoint_is_compared(world2, tmp_path):
    model = build_model("qwen3")
    model.model.save_pretrained(tmp_path)
    compared = _compared(world2, str(tmp_path))
    assert "model.layers.0.self_attn.q_proj.weight" in compared


@pytest.mark.world
def test_each_kind_is_compared_in_the_first_and_in_the_last_layer(world2, saved):
    compared = _compared(world2, saved("gemma4_text"))
    layers = {name.split(".")[2] for name in compared if ".layers." in name}
    last = build_model("gemma4_text").config.num_hidden_layers - 1
    assert layers >= {"0", str(last)}
    kinds = {name.split(".", 3)[3] for name in compared if ".layers." in name}
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"} <= kinds


def test_one_process_is_not_compared(saved, monkeypatch):
    monkeypatch.setattr(load, "check_against_checkpoint", None)
    load_base(saved("qwen3"), tp_size=1, **OPTIONS)


def test_files_are_found_in_a_folder_in_a_subfolder_and_in_several_pieces(saved, tmp_path):
    whole = find_safetensors(saved("qwen3"), {})
    names = set(whole)
    assert "model.layers.0.mlp.up_proj.weight" in names
    AutoModelForCausalLM.from_pretrained(saved("qwen3")).save_pretrained(
        tmp_path / "inside", max_shard_size="50KB"
    )
    pieces = find_safetensors(str(tmp_path), {"subfolder": "inside"})
    assert set(pieces) == names
    assert len(set(pieces.values())) > 2
    assert all(file.is_file() for file in pieces.values())


def test_files_of_a_hub_id_are_found_in_the_cache_without_network(tmp_path):
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("a" * 40)
    refs = tmp_path / "models--someone--model" / "refs"
    snapshot.mkdir(parents=True)
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    save_file({"lm_head.weight": torch.zeros(2, 2)}, snapshot / "model.safetensors")
    found = find_safetensors("someone/model", {"cache_dir": str(tmp_path)})
    assert found == {"lm_head.weight": snapshot / "model.safetensors"}


OTHERS = ({"gguf_file": "model.gguf"}, {"variant": "fp16"}, {"use_safetensors": False})


@pytest.mark.parametrize("options", OTHERS)
def test_what_was_not_read_from_safetensors_is_not_compared(saved, options):
    assert find_safetensors(saved("qwen3"), {})
    assert find_safetensors(saved("qwen3"), options) == {}


def test_a_folder_without_safetensors_has_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert find_safetensors(str(tmp_path), {}) == {}
