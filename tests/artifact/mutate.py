"""Adapter folders that nobody should trust: one of a hundred ways to go wrong, drawn by a seed."""

import contextlib
import io
import json
import os
import pickle
import shutil
import warnings
import zipfile

import torch
from safetensors.torch import load_file, save_file

SAFE, BIN, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
BASE, RECORD = "base_fingerprint.json", "base_model.json"

ODD_VALUES = [
    None, True, False, 0, -1, 1, 2, 3, 7, 10**9, 10**30, 0.5, -0.0, 1e300, float("nan"),
    float("inf"), "", "x", "../../etc/passwd", "all-linear", "q_proj", "(", "(.*)+$", "\x00",
    "é" * 5000, [], [""], ["q_proj", 3], [None], ["q_proj"] * 50, [[["q_proj"]]], {}, {"q_proj": 2},
    {"q_proj": "2"}, {"": 4}, {"(": 4}, {"q_proj": -4}, {"q_proj": 10**12}, {"a": {"b": {}}},
    {"model.layers.0.self_attn.q_proj": 4}, "pissa", "loftq", "eva", "corda", "LORA", "CAUSAL_LM",
]  # fmt: skip
ODD_NAMES = [
    "", ".", "..", "../x", "/etc/passwd", "a\x00b", "a\nb", "x" * 5000, "base_model.model.",
    "base_model.model.lora_A.weight", "lora_A.weight", ".lora_A.weight", "base_model.model..x",
    "base_model.model.model.layers.0.self_attn.q_proj.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.other.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
    "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A",
    "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
    "base_model.model.lm_head.modules_to_save.default.weight", "base_model.model.lm_head.weight",
    "base_model.model.lm_head.bias", "__metadata__",
    "model.layers.0.self_attn.q_proj.lora_A.weight",
]  # fmt: skip
FIELDS = [
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern",
    "alpha_pattern", "peft_type", "task_type", "bias", "use_rslora", "use_dora",
    "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "megatron_config", "megatron_core", "trainable_token_indices", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "velora_config", "alora_invocation_tokens",
    "use_qalora", "qalora_group_size", "lora_bias", "monteclora_config", "layer_replication",
    "runtime_config", "target_parameters", "use_bdlora", "arrow_config", "kasa_config",
    "ensure_weight_tying", "auto_mapping", "peft_version", "base_model_name_or_path",
    "revision", "inference_mode", "fan_in_fan_out", "made_up_field",
]  # fmt: skip


class Payload:
    """A pickle that leaves a mark where it runs."""

    def __init__(self, mark, how):
        self.mark, self.how = str(mark), how

    def __reduce__(self):
        command = f"open({self.mark!r}, 'w').close()"
        return {
            "exec": (exec, (command,)),
            "system": (os.system, (f"touch {self.mark}",)),
            "open": (open, (self.mark, "w")),
            "load": (torch.serialization.load, (self.mark,)),
        }[self.how]


def mutate(folder, rng, mark):
    """Change ``folder``, a good adapter's, in one to three ways; say which."""
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        way = rng.choice(WAYS)
        done.append(way.__name__)
        with contextlib.suppress(Exception):  # an earlier way may leave nothing to change
            way(folder, rng, mark)
    return done


def _file(folder, rng):
    names = [
        name for name in (SAFE, BIN, CONFIG, "tokenizer_config.json") if _is_plain(folder, name)
    ]
    return folder / rng.choice(names) if names else None


def _is_plain(folder, name):
    return (folder / name).is_file() and not (folder / name).is_symlink()


def _flip(folder, rng, mark):
    path = _file(folder, rng)
    if path is None:
        return
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 30])):
        if data:
            data[rng.randrange(min(len(data), rng.choice([16, 2000, 10**9])))] = rng.randrange(256)
    path.write_bytes(data)


def _cut(folder, rng, mark):
    path = _file(folder, rng)
    if path is not None:
        data = path.read_bytes()
        path.write_bytes(data[: rng.randrange(len(data) + 1)])


def _lengthen(folder, rng, mark):
    path = _file(folder, rng)
    if path is not None:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + rng.choice([1, 8, 4096, 1 << 20]))


def _insert(folder, rng, mark):
    path = _file(folder, rng)
    if path is not None:
        data = path.read_bytes()
        at = rng.randrange(len(data) + 1)
        path.write_bytes(data[:at] + rng.randbytes(rng.choice([1, 3, 64])) + data[at:])


def _splice_header(folder, change):
    path = folder / SAFE
    if not _is_plain(folder, SAFE):
        return
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length])).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def _header_entry(folder, rng, mark):
    def change(header):
        name = rng.choice(sorted(header))
        odd = {
            "dtype": ["F8_E4M3", "I64", "BOOL", "F64", "F16", "BF16", "X", None, 3, "F4", "C64"],
            "shape": [
                [],
                [0],
                [-1],
                [4],
                [2**63],
                [2**32, 2**32],
                [4, 32, 1],
                "4",
                None,
                [4.0, 32],
            ],
            "data_offsets": [[0, 0], [0, 8], [8, 0], [-8, 8], [0, 2**62], [4, 516], [0], None],
        }
        key = rng.choice(sorted(odd))
        header[name][key] = rng.choice(odd[key])
        return json.dumps(header)

    _splice_header(folder, change)


def _header_shape(folder, rng, mark):
    """The same bytes, told otherwise."""

    def change(header):
        name = rng.choice([name for name in sorted(header) if name != "__metadata__"])
        shape = header[name]["shape"]
        number = shape[0] * shape[1]
        header[name]["shape"] = rng.choice(
            [shape[::-1], [number], [1, number], [number, 1], [1, 1, *shape], [*shape, *[1] * 40]]
        )
        return json.dumps(header)

    _splice_header(folder, change)


def _header_double(folder, rng, mark):
    def change(header):
        text = json.dumps(header)
        name = rng.choice(sorted(header))
        return text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"

    _splice_header(folder, change)


def _header_swap(folder, rng, mark):
    def change(header):
        first, second = rng.sample([name for name in sorted(header) if name != "__metadata__"], 2)
        key = rng.choice(["data_offsets", "shape"])
        if rng.random() < 0.5:
            header[first][key] = header[second][key]
        else:
            header[first], header[second] = header[second], header[first]
        return json.dumps(header)

    _splice_header(folder, change)


def _header_deep(folder, rng, mark):
    _splice_header(folder, lambda header: '{"a":' * 100_000 + "1" + "}" * 100_000)


def _header_length(folder, rng, mark):
    path = folder / SAFE
    if _is_plain(folder, SAFE):
        length = rng.choice([0, 1, 7, 2**20, 99_999_999, 2**40, 2**63, 2**64 - 1])
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])


def _config_value(folder, rng, mark):
    def change(values):
        values[rng.choice(FIELDS)] = rng.choice(ODD_VALUES)
        return json.dumps(values)

    _config(folder, change)


def _config_gone(folder, rng, mark):
    def change(values):
        for name in rng.sample(sorted(values), min(len(values), rng.choice([1, 3, 20]))):
            values.pop(name)
        return json.dumps(values)

    _config(folder, change)


def _config_double(folder, rng, mark):
    def change(values):
        name = rng.choice(sorted(values))
        return json.dumps(values)[:-1] + f', "{name}": {json.dumps(rng.choice(ODD_VALUES))}}}'

    _config(folder, change)


def _config_other(folder, rng, mark):
    texts = [
        "",
        "[]",
        "null",
        "3",
        '"x"',
        "{",
        "[" * 100_000,
        "{}",
        '{"peft_type": "LORA"}',
        "\ufeff{}",
    ]
    _config(folder, lambda values: rng.choice(texts))


def _config(folder, change):
    path = folder / CONFIG
    if not _is_plain(folder, CONFIG):
        return
    text = change(json.loads(path.read_bytes()))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def _config_bytes(folder, rng, mark):
    """Text in another encoding, or far too much of it."""
    if not _is_plain(folder, CONFIG):
        return
    text = (folder / CONFIG).read_text("utf-8")
    odd = rng.choice(["utf-16", "utf-8-sig", "latin-1", "broken", "huge"])
    if odd == "huge":
        data = text.encode() + b" " * (40 << 20)
    elif odd == "broken":
        data = text.replace("LORA", "LOR\xc4").encode("latin-1")
    else:
        data = text.replace("q_proj", "q_pr\xf6j").encode(odd)
    (folder / CONFIG).write_bytes(data)


def _config_code(folder, rng, mark):
    """Fields by which peft and transformers import what somebody else has written."""

    def change(values):
        module = rng.choice(["os", "antigravity", "mark", "adapter_code"])
        mapping = {"base_model_class": "system", "parent_library": module}
        odd = {
            "auto_mapping": mapping,
            "auto_map": {"AutoModel": f"{module}.Evil"},
            "megatron_core": module,
            "megatron_config": {"x": 1},
            "custom_modules": {"Linear": f"{module}.system"},
        }
        name = rng.choice(sorted(odd))
        return json.dumps(values | {name: odd[name]})

    code = f"open({str(mark)!r}, 'w').close()\n"
    for name in ("adapter_code.py", "mark.py", "modeling.py", "conftest.py"):
        (folder / name).write_text(code)
    _config(folder, change)


def _beside(folder, rng, mark):
    """What says which base it was, and how that was held."""
    name = rng.choice([BASE, RECORD])
    if not _is_plain(folder, name):
        return
    values = json.loads((folder / name).read_text())
    place = values
    while isinstance(place, dict) and place:
        key = rng.choice(sorted(place))
        if not isinstance(place[key], dict) or not place[key] or rng.random() < 0.3:
            place[key] = rng.choice([*ODD_VALUES, "0" * 15, "ff" * 8, [2**70, -1], "auto"])
            break
        place = place[key]
    (folder / name).write_text(json.dumps(values))


def _archive(folder, rng, mark):
    """The archive of a ``.bin`` lies about what it holds."""
    _as_bin(folder, rng, mark)
    if not _is_plain(folder, BIN) or not zipfile.is_zipfile(folder / BIN):
        return
    made, odd = io.BytesIO(), rng.choice(["bomb", "outside", "twice", "sizes"])
    with zipfile.ZipFile(folder / BIN) as old, zipfile.ZipFile(made, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        name = old.namelist()[0]
        if odd == "bomb":
            new.writestr("archive/data/99", b"\0" * (8 << 20), zipfile.ZIP_DEFLATED)
        if odd == "outside":
            new.writestr("../../mark", b"x")
        if odd == "twice":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                new.writestr(name, b"x")
    data = bytearray(made.getvalue())
    if odd == "sizes":
        at = data.rfind(b"PK\x01\x02") + rng.choice([16, 20, 24, 42])
        data[at : at + 4] = rng.choice([0, 1, 2**31, 2**32 - 1]).to_bytes(4, "little")
    (folder / BIN).write_bytes(data)


def _folder_link(folder, rng, mark):
    """A folder that is copied whole, and leads elsewhere."""
    place = folder / "additional_chat_templates"
    _remove(place)
    if rng.random() < 0.5:
        place.symlink_to("..")
    else:
        place.mkdir()
        (place / "x.jinja").symlink_to(rng.choice(["/etc/passwd", "../../outside.txt"]))


def _tensors(folder, change):
    if not _is_plain(folder, SAFE):
        return
    made = change(load_file(folder / SAFE))
    save_file({name: one.contiguous() for name, one in made.items()}, folder / SAFE)


def _tensor_value(folder, rng, mark):
    def change(tensors):
        name = rng.choice(sorted(tensors))
        one = tensors[name].clone()
        odd = rng.choice(
            ["nan", "inf", "zero", "huge", "cut", "turn", "int", "more", "half", "flat"]
        )
        if odd in ("nan", "inf", "huge"):
            one.view(-1)[0] = {"nan": float("nan"), "inf": float("-inf"), "huge": 3e38}[odd]
        made = {
            "zero": one * 0,
            "cut": one[: max(1, len(one) // 2)],
            "turn": one.T,
            "int": one.to(rng.choice([torch.int64, torch.int8, torch.bool, torch.float8_e4m3fn])),
            "more": torch.cat([one, one]),
            "half": one.to(rng.choice([torch.float16, torch.bfloat16, torch.float64])),
            "flat": one.flatten(),
        }
        return tensors | {name: made.get(odd, one)}

    _tensors(folder, change)


def _tensor_name(folder, rng, mark):
    def change(tensors):
        name, odd = rng.choice(sorted(tensors)), rng.choice(ODD_NAMES)
        kept = tensors if rng.random() < 0.5 else {k: v for k, v in tensors.items() if k != name}
        return kept | {odd: tensors[name].clone()}

    _tensors(folder, change)


def _tensor_gone(folder, rng, mark):
    def change(tensors):
        names = rng.sample(sorted(tensors), rng.randrange(1, len(tensors) + 1))
        return {name: one for name, one in tensors.items() if name not in names}

    _tensors(folder, change)


def _layout(folder, rng, mark):
    """Keys as other tools write them."""
    outer = rng.choice(["", "module.", "model.", "base_model.model.", "_orig_mod."])
    inner = rng.choice(["", "default.", "mine."])
    is_bare = rng.random() < 0.3

    def change(tensors):
        made = {}
        for name, one in tensors.items():
            new = name.replace(".weight", f".{inner}weight")
            made[outer + (new.removeprefix("base_model.model.") if is_bare else new)] = one
        return made

    _tensors(folder, change)


def _as_bin(folder, rng, mark):
    if not _is_plain(folder, SAFE):
        return
    tensors = load_file(folder / SAFE)
    (folder / SAFE).unlink()
    _remove(folder / BIN)
    odd = rng.choice(["", "", "old", "view", "sparse", "list", "nested", "packed", "meta"])
    name = min(tensors) if tensors else "x"
    if odd == "view":
        tensors[name] = torch.zeros(1).expand(10**6, 10**6)
    if odd == "sparse":
        tensors[name] = torch.zeros(4, 4).to_sparse()
    if odd == "meta":
        tensors[name] = torch.zeros(4, 4, device="meta")
    saved = {"list": list(tensors.values()), "nested": {"state_dict": tensors}}.get(odd, tensors)
    torch.save(saved, folder / BIN, _use_new_zipfile_serialization=odd != "old")
    if odd == "packed":
        _deflate(folder / BIN)


def _deflate(path):
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    path.write_bytes(made.getvalue())


def _as_payload(folder, rng, mark):
    _remove(folder / SAFE)
    _remove(folder / BIN)
    payload = {"weight": Payload(mark, rng.choice(["exec", "system", "open", "load"]))}
    if rng.random() < 0.5:
        (folder / BIN).write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, folder / BIN)


def _link(folder, rng, mark):
    name = rng.choice([SAFE, CONFIG, "tokenizer.json", "tokenizer_config.json"])
    to = rng.choice(["/etc/passwd", "../outside.txt", "nowhere", "/dev/zero", name, CONFIG])
    _remove(folder / name)
    (folder / name).symlink_to(to)


def _strange_file(folder, rng, mark):
    path = folder / rng.choice([SAFE, BIN, CONFIG, "tokenizer_config.json"])
    _remove(path)
    rng.choice([path.mkdir, lambda: os.mkfifo(path), path.touch, lambda: None])()


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


WAYS = [
    _flip, _cut, _lengthen, _insert, _header_entry, _header_shape, _header_double, _header_swap,
    _header_deep, _header_length, _config_value, _config_value, _config_value, _config_gone,
    _config_double, _config_other, _tensor_value, _tensor_value, _tensor_name, _tensor_name,
    _tensor_gone, _layout, _as_bin, _as_payload, _link, _strange_file, _config_bytes, _config_code,
    _beside, _archive, _folder_link,
]  # fmt: skip
