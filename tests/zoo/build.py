"""Tiny random checkpoints of every causal architecture of transformers that carries a TP plan.

A config is shrunk by rules: ``RULES`` maps attribute names to tiny values and applies to whatever
attributes the default config has (None stays None); lists of layer kinds are cycled over the new
number of layers; ``OVERRIDES`` has what the rules do not know of one model type. Every size divides
by 2.
"""

import zlib

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SEED = 1234
VOCAB = 256


def architectures() -> list[str]:
    """Model types whose causal model has a tensor-parallel plan of its own."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    )


RULES = {
    # widths
    "hidden_size": 64,
    "n_embd": 64,
    "intermediate_size": 128,
    "n_inner": 128,
    "ffn_hidden_size": 128,
    "intermediate_size_mlp": 128,
    "dense_intermediate_size": 128,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "prefix_dense_intermediate_size": 128,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    # MLA / DSA
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 24,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "o_lora_rank": 16,
    "o_groups": 2,
    # linear attention / mamba / conv
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 8,
    "mamba_dt_rank": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # vocab / positions / tokens
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "unpadded_vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "model_max_length": 128,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "attention_chunk_size": 8,
    "num_nextn_predict_layers": 0,
    # no dropout, no jitter, no router aux loss
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "residual_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embedding_dropout": 0.0,
    "classifier_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
# Twice as many of everything that a model cuts by the head or the group: for four ranks.
WIDE = {
    "num_attention_heads": 8,
    "n_head": 8,
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 8,
    "swa_num_key_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_num_heads": 8,
    "mamba_n_groups": 4,
    "n_groups": 4,
    "index_n_heads": 8,
    "o_groups": 4,
}
# Set even if the default is None
ALWAYS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}
# One entry per layer; recycled from the order in which the distinct values first appear
LAYER_LISTS = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "indexer_types",
    "num_attention_heads_per_layer",
    "no_rope_layers",
    "layer_rope_theta",
)


def _llama4(cls, wide):
    text = tiny_config("llama4_text", wide=wide).to_dict()
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    return cls(text_config=text, vision_config=vision)


class DROP:
    """Override value: do not pass this attribute, keep the class default."""


MAMBA_MIX = ["linear_attention", "full_attention"]
OVERRIDES: dict = {
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 10000.0}
            for k in ("full_attention", "sliding_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": [128] * 4,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "use_mamba_kernels": False,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "full_attn_idxs": DROP,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "granitemoehybrid": {"layer_types": MAMBA_MIX * 2, "num_hidden_layers": 4},
    "llama4": _llama4,
    "minimax": {"head_dim": 16, "block_size": 8},
    "nemotron_h": {"use_mamba_kernels": False},
    "hrm_text": {
        "num_hidden_layers": 4,
        "num_layers_per_stack": 2,
        "H_cycles": 2,
        "L_cycles": 2,
        "L_bp_cycles": [2],
    },
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2},
    "phimoe": {
        "router_jitter_noise": 0.4
    },  # sparsemixer: at 0 all but one expert are masked; train mode samples
    "longcat_flash": {"zero_expert_num": 2},
    "gemma4_unified_text": {"global_head_dim": 32},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
        "hc_lowrank": 16,
    },
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
    "inkling2_loop_text": {
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
}

WIDE_OVERRIDES: dict = {
    "dots3_note_text": {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8},
    "helium": {"head_dim": 8},  # its o_proj takes hidden_size
    "qwen4_exp_text": {"indexer_n_heads": 4},
}


def _cycle(values, n):
    distinct = list(dict.fromkeys(values))
    return [distinct[i % len(distinct)] for i in range(n)]


def shrink_kwargs(ref, *, wide: bool = False) -> dict:
    attrs = {k: v for k, v in ref.__dict__.items() if not k.startswith("_")}
    rules = {**RULES, **WIDE} if wide else RULES
    kw = {k: v for k, v in rules.items() if attrs.get(k) is not None}
    for k, v in ALWAYS.items():
        if k in attrs:
            kw[k] = v
    if "kv_lora_rank" in attrs and kw.get("num_key_value_heads"):
        kw["num_key_value_heads"] = kw["num_attention_heads"]  # MLA has no grouped KV heads
    if (
        attrs.get("kv_lora_rank")
        and attrs.get("head_dim") is not None
        and attrs["head_dim"] == attrs.get("qk_rope_head_dim")
    ):
        kw["head_dim"] = kw["qk_rope_head_dim"]  # there `head_dim` only sizes the rotary table
    if "head_dim" in attrs and attrs["head_dim"] is None:
        kw["head_dim"] = 16
    if "num_key_value_heads" in attrs and attrs["num_key_value_heads"] is None:
        kw["num_key_value_heads"] = rules["num_key_value_heads"]
    if attrs.get("n_group") == 1:
        kw["n_group"] = 1
    # number of layers: 2, or 4 if the layers are not all alike
    lists = {
        k: attrs[k]
        for k in LAYER_LISTS
        if isinstance(attrs.get(k), (list, tuple)) and len(attrs[k])
    }
    mixed = any(len(set(map(str, v))) > 1 for v in lists.values())
    n = 4 if mixed else 2
    for k in ("num_hidden_layers", "n_layer", "num_layers"):
        if k in attrs and k not in getattr(type(ref), "attribute_map", {}):
            kw[k] = n
    for k, v in lists.items():
        kw[k] = _cycle(v, n)
    if "num_attention_heads_per_layer" in kw:
        kw["num_attention_heads_per_layer"] = [rules["num_attention_heads"]] * n
    return kw


def tiny_config(mt: str, *, wide: bool = False):
    """A tiny config of one model type; a wide one has heads enough for four ranks."""
    cls = CONFIG_MAPPING[mt]
    over = OVERRIDES.get(mt, {})
    if callable(over):
        return over(cls, wide)
    kw = shrink_kwargs(cls(), wide=wide)
    for k, v in {**over, **(WIDE_OVERRIDES.get(mt, {}) if wide else {})}.items():
        if v is DROP:
            kw.pop(k, None)
        else:
            kw[k] = v
    return cls(**kw)


def randomize(model, seed: int = SEED):
    """Redraw every parameter from a generator keyed by its name, so that order does not matter.

    Matrices N(0, .1); routers N(0, .5), so that top-k has no ties; vectors their initial value plus
    noise, so that norms stay around their neutral value and decay rates in their valid range.
    """
    kinds = {}
    for name, mod in model.named_modules():
        cls = type(mod).__name__.lower()
        for pn, _ in mod.named_parameters(recurse=False):
            kinds[f"{name}.{pn}" if name else pn] = (cls, mod)
    with torch.no_grad():
        for name, p in model.named_parameters():
            g = torch.Generator().manual_seed((zlib.crc32(name.encode()) + seed) % 2**31)
            noise = torch.randn(p.shape, generator=g)
            leaf, cls = name.rsplit(".", 1)[-1], kinds[name][0]
            router = any(s in cls for s in ("router", "gate", "topk")) or name.endswith(
                (
                    "router.weight",
                    "mlp.gate.weight",
                    "moe.gate.weight",
                    "block_sparse_moe.gate.weight",
                    "feed_forward.gate.weight",
                )
            )
            experts_small = p.ndim == 2 and p.shape[0] <= 8 and router
            if not torch.isfinite(p).all() or p.is_meta:
                p.zero_()
            if p.ndim < 2 or "A_log" in leaf or leaf in ("scale", "per_expert_scale"):
                p.add_(noise * 0.1)
            elif experts_small:
                p.copy_(noise * 0.5)
            elif "norm" in cls:
                p.add_(noise * 0.1)
            elif isinstance(kinds[name][1], (nn.Conv1d,)):
                p.copy_(noise * 0.3)
            else:
                p.copy_(noise * 0.1)
        for mod in model.modules():  # a pad row may or may not survive a reload: keep it at zero
            if isinstance(mod, nn.Embedding) and mod.padding_idx is not None:
                mod.weight[mod.padding_idx].zero_()
        for (
            name,
            b,
        ) in model.named_buffers():  # routing bias of the deepseek family is a persistent buffer
            if name.endswith("e_score_correction_bias") or name.endswith("expert_bias"):
                g = torch.Generator().manual_seed((zlib.crc32(name.encode()) + seed) % 2**31)
                b.add_((torch.randn(b.shape, generator=g) * 0.05).to(b.dtype))
    return model


def build_model(mt: str, config=None):
    config = config or tiny_config(mt)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model.train()
