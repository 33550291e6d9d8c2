"""LoRA under tensor parallelism: a run at tp_size N is the run at tp_size 1.

    model = tplora.load_base("a/model", tp_size=2)
    model = tplora.attach_adapter(model, LoraConfig(target_modules="all-linear"))
    args = SFTConfig(..., parallelism_config=tplora.parallelism_config(model))
    SFTTrainer(model=model, args=args, train_dataset=rows).train()
    tplora.save_adapter(model, "out")

Nothing heavy is imported until one of these names is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tplora.adapter.attach import attach_adapter
    from tplora.adapter.load import load_factors
    from tplora.adapter.loftq import replace_lora_weights_loftq
    from tplora.adapter.merged_save import save_merged
    from tplora.adapter.merging import merge_adapter, unmerge_adapter
    from tplora.adapter.model import TploraModel
    from tplora.adapter.save import save_adapter
    from tplora.artifact.merge import merge_adapters
    from tplora.artifact.verify import verify_adapter
    from tplora.base.load import load_base
    from tplora.errors import TploraError
    from tplora.mesh import current_processes, join_process_group
    from tplora.plan.build import Plan, build_plan
    from tplora.plan.lora import expert_parameters
    from tplora.plan.report import render_plan
    from tplora.recipe.check import read_recipe
    from tplora.run.finetune import run_finetune
    from tplora.train.parallelism import parallelism_config
    from tplora.train.trainer import TploraDPOTrainer, TploraKTOTrainer, TploraSFTTrainer

__version__ = "0.1.0"

_HOMES = {
    "Plan": "tplora.plan.build",
    "TploraDPOTrainer": "tplora.train.trainer",
    "TploraError": "tplora.errors",
    "TploraKTOTrainer": "tplora.train.trainer",
    "TploraModel": "tplora.adapter.model",
    "TploraSFTTrainer": "tplora.train.trainer",
    "attach_adapter": "tplora.adapter.attach",
    "build_plan": "tplora.plan.build",
    "current_processes": "tplora.mesh",
    "expert_parameters": "tplora.plan.lora",
    "join_process_group": "tplora.mesh",
    "load_base": "tplora.base.load",
    "load_factors": "tplora.adapter.load",
    "merge_adapter": "tplora.adapter.merging",
    "merge_adapters": "tplora.artifact.merge",
    "parallelism_config": "tplora.train.parallelism",
    "read_recipe": "tplora.recipe.check",
    "render_plan": "tplora.plan.report",
    "replace_lora_weights_loftq": "tplora.adapter.loftq",
    "run_finetune": "tplora.run.finetune",
    "save_adapter": "tplora.adapter.save",
    "save_merged": "tplora.adapter.merged_save",
    "unmerge_adapter": "tplora.adapter.merging",
    "verify_adapter": "tplora.artifact.verify",
}

__all__ = [
    "Plan",
    "TploraDPOTrainer",
    "TploraError",
    "TploraKTOTrainer",
    "TploraModel",
    "TploraSFTTrainer",
    "attach_adapter",
    "build_plan",
    "current_processes",
    "expert_parameters",
    "join_process_group",
    "load_base",
    "load_factors",
    "merge_adapter",
    "merge_adapters",
    "parallelism_config",
    "read_recipe",
    "render_plan",
    "replace_lora_weights_loftq",
    "run_finetune",
    "save_adapter",
    "save_merged",
    "unmerge_adapter",
    "verify_adapter",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tplora' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
