"""Every field of peft's ``LoraConfig``: exact under tensor parallelism, or refused and why.

The tests hold the table to the class: a field of peft's that is not here fails them, and so does an
exact one that no parity test uses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BESIDE_AN_ADAPTER",
    "INITS",
    "INITS_IN_PYTHON",
    "LORA_FIELDS",
    "OWN_KEYS",
    "REFUSED_INITS",
    "LoraField",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraField:
    """What becomes of one field."""

    state: Literal["exact", "refused", "record"]
    """"record" says what an adapter is or where it comes from, not what it computes."""
    note: str = ""
    """Of an exact field, how far; of a refused one, why, and what to do instead."""
    only: tuple[object, ...] = ()
    """The values that are exact, where not all of them are."""


def _exact(note: str = "", *, only: tuple[object, ...] = ()) -> LoraField:
    return LoraField(state="exact", note=note, only=only)


def _refused(why: str) -> LoraField:
    return LoraField(state="refused", note=why)


def _record(note: str = "") -> LoraField:
    return LoraField(state="record", note=note)


INITS = (True, False, "gaussian", "orthogonal", "pissa", "olora", "mica", "corda", "lora_ga")
"""Values of ``init_lora_weights`` that are exact; "pissa_niter_N" is as well."""

INITS_IN_PYTHON: Mapping[str, str] = {
    "corda": "reads what peft's preprocess_corda leaves on a loaded model",
    "lora_ga": "reads what peft's preprocess_loraga leaves on a loaded model",
}
"""Those that a recipe cannot ask for, and why."""

REFUSED_INITS: Mapping[str, str] = {
    "loftq": (
        "makes the base the sum of a rounded weight and factors, and holds it unquantised; set "
        "lora.loftq = true and [quantization] load_in_4bit = true, or call "
        "tplora.replace_lora_weights_loftq, for LoftQ's factors on a base in 4 bits"
    ),
    "eva": (
        "computes A from whole inputs of every layer, which are cut here; run peft's "
        "initialize_lora_eva_weights in one process, save, and start from that folder with "
        "lora.adapter_name_or_path"
    ),
}

LORA_FIELDS: Mapping[str, LoraField] = {
    "task_type": _exact("SEQ_CLS in Python alone", only=("CAUSAL_LM", "SEQ_CLS")),
    "peft_type": _record(),
    "auto_mapping": _record(),
    "peft_version": _record(),
    "base_model_name_or_path": _record(),
    "revision": _record("of the base"),
    "inference_mode": _record("nothing is trained"),
    "r": _exact(),
    "target_modules": _exact(
        'a list, a regular expression, or "all-linear": every linear layer but the head, and no '
        "experts, which peft takes along for some mixtures of experts (lora.experts = true adapts "
        "them)"
    ),
    "exclude_modules": _exact(),
    "lora_alpha": _exact(),
    "lora_dropout": _exact("masks are the same at every tp_size"),
    "fan_in_fan_out": _refused(
        "is for Conv1D (GPT-2), which no architecture with a tensor-parallel plan has; leave it out"
    ),
    "bias": _exact("linear layers, norms and routers", only=("none", "all", "lora_only")),
    "use_rslora": _exact(),
    "modules_to_save": _exact("linear layers, embeddings, norms and routers"),
    "init_lora_weights": _exact(
        '"corda" and "lora_ga" in Python alone, after peft\'s preprocessing; not "loftq" and "eva"'
    ),
    "layers_to_transform": _exact(),
    "layers_pattern": _exact(),
    "rank_pattern": _exact(),
    "alpha_pattern": _exact(),
    "megatron_config": _refused("is for Megatron's own layers; leave it out"),
    "megatron_core": _refused("is for Megatron's own layers; leave it out"),
    "trainable_token_indices": _exact("a tied head follows the embedding"),
    "loftq_config": _refused(REFUSED_INITS["loftq"]),
    "eva_config": _refused(REFUSED_INITS["eva"]),
    "corda_config": _exact('read by init_lora_weights = "corda"'),
    "lora_ga_config": _exact('read by init_lora_weights = "lora_ga"'),
    "use_dora": _exact("linear layers and embeddings; the norm is over the whole row"),
    "velora_config": _refused(
        "compresses the input of A by groups of features that a cut input does not hold whole; "
        "leave it out, and save memory with train.gradient_checkpointing"
    ),
    "alora_invocation_tokens": _exact("linear layers but the head"),
    "use_qalora": _refused("works on GPTQ layers alone, which are not loaded; leave it out"),
    "qalora_group_size": _refused("belongs to use_qalora; leave it out"),
    "monteclora_config": _refused(
        "draws noise in each layer on each rank, so ranks would differ; use lora_dropout"
    ),
    "layer_replication": _refused(
        "copies layers whose tensor-parallel forward stays bound to the first; write the "
        "replicated model to a folder and adapt that"
    ),
    "runtime_config": _refused("moves factors between devices while they are made; leave it out"),
    "lora_bias": _exact("linear layers"),
    "target_parameters": _exact(),
    "use_bdlora": _exact("blocks follow the cut; nblocks has to be a multiple of tp_size there"),
    "arrow_config": _refused(
        "routes tokens between adapters by their whole factors; combine adapters with "
        "model.add_weighted_adapter instead"
    ),
    "kasa_config": _exact("linear layers, as the model's only adapter"),
    "ensure_weight_tying": _exact("of modules_to_save and trainable_token_indices"),
}

OWN_KEYS: Mapping[str, str] = {
    "experts": "true adapts every stack of expert weights",
    "loftq": "true begins with LoftQ's factors (one step) on a base that load_in_4bit quantises",
    "adapter_name_or_path": "a folder with an adapter to start from, in place of all other fields",
    "autocast_adapter_dtype": "false holds the factors in the base's dtype, not in float32",
    "loraplus_lr_ratio": "LoRA+: the learning rate of B over that of A",
    "loraplus_lr_embedding": "LoRA+: the learning rate of embeddings' factors",
}
"""Keys of ``[lora]`` that are tplora's own, and what they do."""

BESIDE_AN_ADAPTER = tuple(key for key in OWN_KEYS if key not in ("experts", "loftq"))
"""What may be given together with an adapter to start from."""
