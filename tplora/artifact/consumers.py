"""What the programs that take LoRA adapters take of one: the only table of it.

Read in their sources at the commits named here, not tried in them, but for PEFT and transformers,
which the tests load adapters in. ``docs/consumers.md`` is written from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONSUMERS", "KEPT", "PARTS", "Consumer", "Rule", "Source"]

PARTS: Mapping[str, str] = {
    "rslora": "rsLoRA's scaling, alpha / sqrt(r) (use_rslora)",
    "patterns": "modules of their own rank or scaling (rank_pattern, alpha_pattern)",
    "embedding": "factors of an embedding",
    "head": "factors of the head (lm_head)",
    "saved_base": "copies of the base's embedding or head",
    "whole": "whole weights in the base's place (modules_to_save)",
    "bias": "biases in the base's place (bias)",
    "tokens": "rows of single tokens (trainable_token_indices)",
    "dora": "magnitudes (use_dora)",
    "lora_bias": "a bias of B (lora_bias)",
    "experts": "factors of experts (target_parameters)",
    "blocks": "block-diagonal factors (use_bdlora)",
    "other_base": "a start that changes the base's weights (init_lora_weights)",
    "activated": "a start inside the text (alora_invocation_tokens)",
}
"""What an adapter can hold beside plain pairs of A and B, and how it is called."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rule was read."""

    repository: str
    commit: str
    """Or the release, of what is installed and tried."""
    file: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit[:10]} {self.file}"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a part of an adapter."""

    verdict: Literal["kept", "folded", "left out", "refused"]
    """``folded``: written another way, the same product; ``left out``: is the base's own."""
    why: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A program that takes adapters."""

    title: str
    writes: Literal["peft", "gguf"]
    rules: Mapping[str, Rule]
    """By the parts of ``PARTS``; a part without a rule is kept."""
    ranks: tuple[int, ...] = ()
    """What its largest rank can be set to; empty: any."""
    modules: str = r".*"
    """A regular expression of the whole names of the modules it looks for."""
    modules_source: Source | None = None
    model_types: Mapping[str, str] = field(default_factory=dict)
    """Of the base, to its name there; empty: any."""
    every_layer: bool = False
    """Whether a module that is adapted in one layer has to be in every layer."""
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """A module that is adapted to those beside it that have to be, too: it stacks them."""
    needs_source: Source | None = None
    serve: str = ""
    """The command that takes what was written; {base}, {out} and {rank} are filled in."""


KEPT = Rule("kept", "", Source("", "", ""))

_PEFT = Source("huggingface/peft", "0.21.2", "PeftModel.from_pretrained (tried)")
_TRANSFORMERS = Source("huggingface/transformers", "5.24.0", "load_adapter (tried)")

_VLLM = "vllm-project/vllm"
_VLLM_CONFIG = Source(_VLLM, "e745bafffc44", "vllm/lora/peft_helper.py")
_VLLM_NAMES = Source(_VLLM, "0fd157078c53", "vllm/lora/utils.py")
_VLLM_MODEL = Source(_VLLM, "0306474e9d1f", "vllm/lora/lora_model.py")
_VLLM_SCALE = Source(_VLLM, "4c78406e054e", "vllm/lora/lora_weights.py")

_CPP = "ggml-org/llama.cpp"
_CPP_WRITE = Source(_CPP, "0b03adaa632b", "convert_lora_to_gguf.py")
_CPP_READ = Source(_CPP, "0650ea8c05bc", "src/llama-adapter.cpp")
_CPP_SCALE = Source(_CPP, "215841fc0178", "src/llama-adapter.h")

_SGL = "sgl-project/sglang"
_SGL_CONFIG = Source(_SGL, "0ceb81fe4868", "python/sglang/srt/lora/lora_config.py")
_SGL_NAMES = Source(_SGL, "01235a1633d1", "python/sglang/srt/lora/utils.py")
# A fork: of the main repository an older state of this file was at hand, of the same scaling.
_SGL_LOAD = Source("amdpilot-org/sglang", "a91a89d0751d", "python/sglang/srt/lora/lora.py")

_TGI = "huggingface/text-generation-inference"
_TGI_LORA = Source(_TGI, "45d95bdccc9d", "server/text_generation_server/adapters/lora.py")
_TGI_NAMES = Source(_TGI, "4b569341e6f6", "server/text_generation_server/utils/adapter.py")

_LAYERS = r"model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def _refused(source: Source, **why: str) -> dict[str, Rule]:
    return {part: Rule("refused", reason, source) for part, reason in why.items()}


def _server(names: Source, config: Source) -> dict[str, Rule]:
    """What none of the servers takes: only pairs of A and B are read."""
    pairs = "only lora_A and lora_B are read"
    return {
        **_refused(names, whole=pairs, bias=pairs, tokens=pairs, lora_bias=pairs),
        **_refused(
            config,
            dora="magnitudes are not computed",
            blocks="factors are read as whole matrices",
            other_base="the factors belong to weights that only PEFT makes of the base's",
            activated="the factors would be at work in the whole text",
        ),
        **_refused(names, experts="the stacked factors are read by few models, each its own way"),
    }


CONSUMERS: Mapping[str, Consumer] = {
    "peft": Consumer(title="PEFT", writes="peft", rules={}),
    "transformers": Consumer(
        title="transformers' load_adapter",
        writes="peft",
        rules=_refused(
            _TRANSFORMERS,
            dora="its magnitudes are looked up under other names, and made anew with a warning",
            experts="stacked factors were not tried",
            blocks="block-diagonal factors were not tried",
            other_base="the base's change was not tried",
            activated="forward gets no place to start at",
        ),
    ),
    "vllm": Consumer(
        title="vLLM",
        writes="peft",
        ranks=(8, 16, 32, 64, 128, 256, 320, 512),
        rules={
            **_server(_VLLM_NAMES, _VLLM_CONFIG),
            "rslora": Rule("kept", "use_rslora is read", _VLLM_CONFIG),
            "patterns": Rule("folded", "one r and one lora_alpha are read", _VLLM_SCALE),
            "embedding": Rule("kept", "with the base's own number of tokens", _VLLM_MODEL),
            "head": Rule("kept", "where the model names it as its output", _VLLM_NAMES),
            "saved_base": Rule("left out", "is skipped, the base's own is used", _VLLM_MODEL),
        },
        modules=r"(?!.*\.experts(\.|$)).*",
        modules_source=_VLLM_MODEL,
        serve="vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules NAME={out}",
    ),
    "sglang": Consumer(
        title="SGLang",
        writes="peft",
        rules={
            **_server(_SGL_NAMES, _SGL_CONFIG),
            "rslora": Rule("folded", "the scaling is lora_alpha / r", _SGL_LOAD),
            "patterns": Rule("folded", "an adapter with such patterns is refused", _SGL_CONFIG),
            "embedding": Rule("kept", "embed_tokens is a known module", _SGL_NAMES),
            "head": Rule("kept", "lm_head is a known module", _SGL_NAMES),
            "saved_base": Rule("left out", "is no factor, the base's own is used", _SGL_NAMES),
        },
        modules=r"(?!.*\.experts(\.|$))(.*\.)?(q_proj|k_proj|v_proj|qkv_proj|o_proj|out_proj|"
        r"gate_proj|up_proj|gate_up_proj|down_proj|embed_tokens|lm_head|q_a_proj|q_b_proj|"
        r"kv_a_proj_with_mqa|kv_b_proj)",
        modules_source=_SGL_NAMES,
        needs={
            "q_proj": ("v_proj",),
            "k_proj": ("q_proj", "v_proj"),
            "v_proj": ("q_proj",),
            "up_proj": ("gate_proj",),
        },
        needs_source=_SGL_LOAD,
        serve="python -m sglang.launch_server --model-path {base} --enable-lora "
        "--lora-paths NAME={out}",
    ),
    "tgi": Consumer(
        title="TGI",
        writes="peft",
        rules={
            **_server(_TGI_NAMES, _TGI_LORA),
            **_refused(_TGI_NAMES, embedding="only layers and the head are looked up"),
            "rslora": Rule("kept", "use_rslora is read", _TGI_LORA),
            "patterns": Rule("folded", "one r and one lora_alpha are read", _TGI_LORA),
            "head": Rule("kept", "lm_head is looked up", _TGI_NAMES),
            "saved_base": Rule("left out", "is not looked up, the base's own is used", _TGI_LORA),
        },
        modules=rf"{_LAYERS}|lm_head",
        modules_source=_TGI_NAMES,
        every_layer=True,
        serve="text-generation-launcher --model-id {base} --lora-adapters NAME={out}",
    ),
    "llama.cpp": Consumer(
        title="llama.cpp",
        writes="gguf",
        rules={
            **_server(_CPP_WRITE, _CPP_WRITE),
            "rslora": Rule("folded", "the scaling is alpha / r", _CPP_SCALE),
            "patterns": Rule("folded", "one alpha is read, and each rank from B", _CPP_SCALE),
            "embedding": Rule("kept", "A transposed, where the head is not tied to it", _CPP_READ),
            "head": Rule("kept", "where it is not tied to the embedding", _CPP_WRITE),
            "saved_base": Rule("left out", "is skipped, the base's own is used", _CPP_WRITE),
        },
        modules=rf"{_LAYERS}|model\.embed_tokens|lm_head",
        modules_source=_CPP_WRITE,
        model_types={"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
        serve="llama-cli -m BASE.gguf --lora {out}/adapter.gguf",
    ),
}
"""By the name that ``--for`` takes."""
