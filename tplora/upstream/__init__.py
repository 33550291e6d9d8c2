"""Every private name of torch, transformers, peft, accelerate and trl that tplora uses.

Each function says which version its private name was read in. Public names are imported where they
are used. When a new release moves one of these, this is the only folder that changes.
"""

from tplora.upstream.dtensor import (
    copying_shards,
    local_shard,
    norms_of,
    number_of_node,
    placement_of,
    queue_after_backward,
    set_number_of_node,
)
from tplora.upstream.models import (
    MENDED_STYLES,
    auto_class,
    auto_class_of,
    build_meta_model,
    expanded_tp_plan,
    experts_implementation,
    grouped_mm,
    own_forward,
    tp_mesh,
    transform_output,
)
from tplora.upstream.peft_layers import (
    adapter_target_names,
    lora_alpha_of,
    lora_rank_of,
    matches_pattern,
    peft_moved_names,
    peft_refusal,
    peft_without_moved_names,
    peft_without_tensor_parallelism,
    register_lora_layers,
    with_all_linear_named,
)
from tplora.upstream.peft_wrappers import (
    building_token_layers,
    embedding_name,
    modules_saved_with_task,
    names_tied_with_embedding,
)
from tplora.upstream.trainers import (
    CpuParallelismConfig,
    TakesTokenizedRows,
    load_rng_file,
    note_callback_states,
    remove_old_checkpoints,
    trainer_that_resumes,
    trl_fused_head,
    trl_without_head_check,
    uploads_model,
)

__all__ = [
    "MENDED_STYLES",
    "CpuParallelismConfig",
    "TakesTokenizedRows",
    "adapter_target_names",
    "auto_class",
    "auto_class_of",
    "build_meta_model",
    "building_token_layers",
    "copying_shards",
    "embedding_name",
    "expanded_tp_plan",
    "experts_implementation",
    "grouped_mm",
    "load_rng_file",
    "local_shard",
    "lora_alpha_of",
    "lora_rank_of",
    "matches_pattern",
    "modules_saved_with_task",
    "names_tied_with_embedding",
    "norms_of",
    "note_callback_states",
    "number_of_node",
    "own_forward",
    "peft_moved_names",
    "peft_refusal",
    "peft_without_moved_names",
    "peft_without_tensor_parallelism",
    "placement_of",
    "queue_after_backward",
    "register_lora_layers",
    "remove_old_checkpoints",
    "set_number_of_node",
    "tp_mesh",
    "trainer_that_resumes",
    "transform_output",
    "trl_fused_head",
    "trl_without_head_check",
    "uploads_model",
    "with_all_linear_named",
]
