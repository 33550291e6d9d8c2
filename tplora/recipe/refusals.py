"""Keys that upstream knows and a recipe may not set, each with its reason and what to do instead.

Refused by name rather than skipped: what was asked for is done exactly, or not at all.
"""

from collections.abc import Mapping

from tplora.recipe.quantization_rules import REFUSED_QUANTIZATION

__all__ = ["REFUSED", "REFUSED_TABLES"]

_SIZES = "not supported yet; leave it out: the axes are tp_size, fsdp_size and dp_replicate_size"
_QUANTIZED = "its keys are those of the table [quantization]; move them there"
_OWN_MESH = "the mesh is built from [parallel]; leave it out"
_EXPERTS = "not supported yet: every rank holds a piece of each expert; leave it out"
_PLAN = "the plan comes from the model's own tensor-parallel plan; leave it out"

REFUSED_TABLES: Mapping[str, str] = {}

REFUSED: Mapping[tuple[str, str], str] = {
    (
        "model",
        "device_map",
    ): "tensor parallelism places the weights itself, a slice on each rank; leave it out",
    ("model", "max_memory"): "tensor parallelism places the weights itself; leave it out",
    ("model", "quantization_config"): _QUANTIZED,
    ("model", "load_in_4bit"): _QUANTIZED,
    ("model", "load_in_8bit"): _QUANTIZED,
    ("model", "torch_dtype"): "transformers calls it dtype; write `dtype`",
    ("model", "tp_size"): "set it in [parallel]",
    ("model", "tp_plan"): _PLAN,
    ("model", "device_mesh"): _OWN_MESH,
    ("model", "distributed_config"): _OWN_MESH,
    ("model", "token"): "a recipe is no place for a secret; log in with the hub's own command",
    ("parallel", "tp_plan"): _PLAN,
    ("parallel", "ep_plan"): _PLAN,
    ("parallel", "fsdp_plan"): _SIZES,
    ("parallel", "fsdp_cpu_offload"): _SIZES,
    ("parallel", "fsdp_mixed_precision"): _SIZES,
    (
        "parallel",
        "enable_sequence_parallel",
    ): "not supported yet: activations are replicated; leave it out",
    (
        "parallel",
        "enable_expert_parallel",
    ): _EXPERTS,
    ("parallel", "ep_implementation"): _EXPERTS,
    ("parallel", "pp_size"): _SIZES,
    ("parallel", "ep_size"): _SIZES,
    ("parallel", "cp_size"): _SIZES,
    ("parallel", "sp_size"): _SIZES,
    ("parallel", "dp_shard_size"): "transformers calls it fsdp_size",
    ("parallel", "dp_size"): "write `dp_replicate_size`",
    **{("quantization", key): reason for key, reason in REFUSED_QUANTIZATION.items()},
}
