"""Tiny random checkpoints of classes that hold a text model beside towers for images or sound.

The text part is shrunk by the rules of ``tests.zoo.build``; towers get one or two small layers.
Whether a checkpoint is loaded as the whole class or as its text model alone is transformers'
choice: see ``tplora.upstream.auto_class``.
"""

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.build import SEED, randomize
from tests.zoo.build import tiny_config as tiny_text_config
from tplora.upstream import auto_class_of

# Heads of width 16: eight rotary frequencies, dealt to time, height and width.
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_LAYERED_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Of each class: its text model's type, what to change in it, and the towers.
_CLASSES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "gemma3": ("gemma3_text", {}, {"vision_config": _LAYERED_VISION}),
    "gemma4": (
        "gemma4_text",
        {},
        {
            "vision_config": {
                "model_type": "gemma4_vision",
                **_LAYERED_VISION,
                "num_key_value_heads": 2,
                "head_dim": 16,
            },
            "audio_config": {
                "model_type": "gemma4_audio",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "subsampling_conv_channels": [8, 4],
                "output_proj_dims": 32,
            },
        },
    ),
    "llama4": (
        "llama4_text",
        {"router_aux_loss_coef": 0.0},  # trl 1.16 reads a num_experts that this config has not
        {
            "vision_config": {
                **_LAYERED_VISION,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            }
        },
    ),
    "mistral3": ("mistral", {}, {"vision_config": {**_LAYERED_VISION, "head_dim": 16}}),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        _MROPE,
        {
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            }
        },
    ),
    "qwen2_vl": (
        "qwen2_vl_text",
        _MROPE,
        {"vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}},
    ),
    "qwen3_5": ("qwen3_5_text", {}, {"vision_config": _QWEN3_VISION}),
    "qwen3_vl": (
        "qwen3_vl_text",
        _MROPE,
        {"vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 1]}},
    ),
}
CLASSES = tuple(_CLASSES)


def tiny_config(model_type: str) -> PretrainedConfig:
    """The tiny config of a whole class, text model and towers."""
    text_type, changes, towers = _CLASSES[model_type]
    text = tiny_text_config(text_type).to_dict() | changes
    return CONFIG_MAPPING[model_type](text_config=text, **towers)


def write_checkpoint(model_type: str, folder) -> str:
    """Save a random model of the whole class, as its publishers do; return the folder."""
    torch.manual_seed(SEED)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        tiny_config(model_type), dtype=torch.float32
    )
    randomize(model)
    model.save_pretrained(folder)
    return str(folder)


def load_plain(path: str, **options: Any) -> PreTrainedModel:
    """The checkpoint in one process, as a user of transformers loads it."""
    return auto_class_of(path).from_pretrained(path, **options)
