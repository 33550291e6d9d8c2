"""Which architectures are exact when cut, proven one by one; what transformers itself gets wrong.

A style that is exact on one model need not be on another, whose own code reads a cut tensor as if
it were whole. So an architecture is cut only when a tiny model of it, with an adapter on every
layer that can have one, gave the loss and every gradient of plain PEFT in one process. This is
what ``tests/zoo`` does for each name in ``PROVEN``.
"""

__all__ = ["KNOWN_FAULTS", "PROVEN", "architecture_problem"]

# Read in transformers 5.24; each goes when its reason does.
KNOWN_FAULTS = {
    "doge": "its attention mask has all heads where queries have this rank's",
    "gemma3n_text": "it takes mean and deviation over this rank's features only",
    "hrm_text": "its weights are wrong after they were cut while loading",
    "inkling_text": "its embedding, cut on the vocabulary, has a norm inside its forward",
    "llama4": "it writes in place to a view of a distributed tensor",
    "llama4_text": "it writes in place to a view of a distributed tensor",
    "phi4_multimodal": "its vision and audio towers are not cut, and its adapters are not proven",
    "phimoe": "its router is a linear layer that returns a tuple and samples while training",
    "sarvam_moe": "its weights cannot be cut while loading",
}
"""Base models that are not themselves when cut, with or without an adapter, and why."""

PROVEN = frozenset(
    [
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "bamba",
        "beam",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "diffllama",
        "dory",
        "dots1",
        "dots3_note_text",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hyperclovax",
        "inkling2_loop_text",
        "inkling2_text",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jamba",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen4_exp_text",
        "sarvam_mla",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    ]
)
"""Model types that ``tests/zoo`` holds to plain PEFT in one process, layer by layer."""


def architecture_problem(model_type: str) -> str | None:
    """Why models of this type are not cut, or None."""
    if model_type in KNOWN_FAULTS:
        return (
            f"{model_type} is not itself when cut: {KNOWN_FAULTS[model_type]} (transformers 5.24)"
        )
    if model_type not in PROVEN:
        return f"{model_type} has not been proven exact when cut"
    return None
