"""Runs that use the fields of a ``LoraConfig``, each to be held to plain PEFT in one process."""

from dataclasses import replace

from peft.tuners.lora.config import BdLoraConfig

from tests.models import Case

BLOCKS = {
    "target_modules_bd_a": ["o_proj", "down_proj"],
    "target_modules_bd_b": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
}

OPTIONS: dict[str, tuple[str, Case]] = {
    # At 1e-2 the first gradient of one number is 1.9e-7 by chance, and AdamW divides by it: plain
    # PEFT itself then differs by 1.1e-12 between AVX2 and AVX-512, by 2.8e-13 at 5e-3.
    "dora": ("llama_bias", Case(changes={"use_dora": True}, lr=5e-3)),
    "dora-fused": ("phi3", Case(changes={"use_dora": True, "use_rslora": True})),
    "dora-ends": ("llama", Case("ends", changes={"use_dora": True})),
    "dora-tied": ("qwen2_tied", Case("ends", changes={"use_dora": True})),
    "dora-drawn": ("olmo2", Case(changes={"use_dora": True, "init_lora_weights": False})),
    "lora-bias": ("llama_bias", Case(changes={"lora_bias": True})),
    "lora-bias-without-bias": ("qwen3", Case(changes={"lora_bias": True})),
    "activated": (
        "llama_bias",
        Case(planted=(5, 6), changes={"alora_invocation_tokens": [5, 6]}),
    ),
    "blocks": (
        "llama_bias",
        Case(changes={"use_bdlora": BdLoraConfig(**BLOCKS, nblocks=6), "r": 6}),
    ),
    "blocks-across": (
        "phi3",
        Case(
            changes={
                "r": 2,
                "use_bdlora": BdLoraConfig(
                    target_modules_bd_a=["qkv_proj"],
                    target_modules_bd_b=["o_proj"],
                    nblocks=2,
                    match_strict=False,
                ),
            }
        ),
    ),
    "patterns": (
        "llama",
        Case(
            changes={
                "target_modules": r".*(q_proj|down_proj|up_proj)",
                "exclude_modules": r".*layers\.0\.mlp\.up_proj",
                "rank_pattern": {"q_proj": 2},
                "alpha_pattern": {"down_proj": 3},
                "use_rslora": True,
                "init_lora_weights": "gaussian",
            }
        ),
    ),
    "layers": (
        "llama",
        Case(
            changes={
                "target_modules": ["q_proj", "o_proj"],
                "layers_to_transform": [1],
                "layers_pattern": "layers",
            }
        ),
    ),
}
"""By what is asked for: a tiny model, and the run."""

DROPPED = {
    name: (model, replace(case, dropout=0.3))
    for name, (model, case) in OPTIONS.items()
    if name in ("dora", "activated", "blocks")
}
"""Runs with dropout, to be held to tplora alone: PEFT's masks are others."""
