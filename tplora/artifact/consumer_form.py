"""An adapter written as a consumer takes it: whole, or not at all with every reason why."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from tplora.artifact.base_copies import find_other_copies
from tplora.artifact.consumer_check import check_fit, find_parts_held
from tplora.artifact.consumers import CONSUMERS, KEPT
from tplora.artifact.mergeable import check_mergeable, check_saved
from tplora.artifact.one_scaling import read_pairs, shared_scaling
from tplora.artifact.side_files import copy_tokenizer
from tplora.errors import ArtifactError
from tplora.files import written_aside
from tplora.saved.tensors import SAFE

if TYPE_CHECKING:
    from pathlib import Path

    from peft import LoraConfig

    from tplora.artifact.adapter_dir import AdapterFiles
    from tplora.artifact.consumer_check import Fit

__all__ = ["write_for"]


def write_for(
    adapter: AdapterFiles,
    name: str,
    base: Any,
    out: Path,
    *,
    base_folder: Path | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    merge_command: str = "tplora export ADAPTER --merged OUT",
) -> Fit:
    """Write the folder ``out`` for a consumer.

    Args:
        adapter: A checked adapter.
        name: Of the consumer, as in ``CONSUMERS``.
        base: The text config of the model it belongs to.
        out: The folder to be.
        base_folder: Of that model, to see that what is left out is its own.
        dtype: Of what is written; the adapter's own when left out, and float32 in GGUF.
        overwrite: Replace what ``out`` holds.
        merge_command: What a refusal says to do instead, where the adapter can be merged.

    Raises:
        ArtifactError: With every reason why the consumer would not take the adapter, or if nothing
            can be written.
    """
    fit = check_fit(adapter, name, base)
    reasons = [*fit.reasons]
    if base_folder is not None and _leaves_copies_out(name):
        reasons += [
            f"its {key} is not the base's own, which would be used"
            for key in find_other_copies(adapter, base_folder)
        ]
    if reasons:
        raise ArtifactError(
            f"{adapter.folder}: {CONSUMERS[name].title} does not take it: "
            f"{'; '.join(reasons)}; {_instead(adapter, merge_command)}"
        )
    with written_aside(out, overwrite=overwrite) as aside:
        if CONSUMERS[name].writes == "gguf":
            from tplora.artifact.gguf_adapter import (  # noqa: PLC0415  (needs gguf)
                ADAPTER_FILE,
                write_gguf_adapter,
            )

            write_gguf_adapter(adapter, base, aside / ADAPTER_FILE, dtype=dtype or torch.float32)
        else:
            _write_peft(adapter, name, aside, dtype)
    return fit


def _leaves_copies_out(name: str) -> bool:
    return CONSUMERS[name].rules.get("saved_base", KEPT).verdict == "left out"


def _instead(adapter: AdapterFiles, merge_command: str) -> str:
    try:
        check_mergeable(adapter)
        check_saved(adapter)
    except ArtifactError:
        return "it cannot be merged either; use it in PEFT"
    return f"merge it instead: {merge_command}"


def _write_peft(adapter: AdapterFiles, name: str, folder: Path, dtype: torch.dtype | None) -> None:
    rules = CONSUMERS[name].rules
    held = find_parts_held(adapter)
    verdicts = {part: rules.get(part, KEPT).verdict for part in held}
    left_out = set(adapter.saved_bases.values()) if _leaves_copies_out(name) else set()
    with adapter.tensors.open() as file:
        names = [key for key in file.keys() if key not in left_out]  # noqa: SIM118
        tensors = {key: file.tensor(key) for key in names}
    config = copy.deepcopy(adapter.config)
    if "folded" in verdicts.values():
        tensors |= _fold(adapter, config)
    if "bias" not in held:  # vLLM refuses the word, even of a base that has none
        config.bias = "none"
    if rules and isinstance(config.target_modules, str):  # a pattern, which only PEFT reads
        config.target_modules = {pair.module for pair in adapter.pairs}
    save_file(
        {key: tensor.to(dtype or tensor.dtype).contiguous() for key, tensor in tensors.items()},
        folder / SAFE,
        metadata={"format": "pt"},
    )
    config.save_pretrained(str(folder))
    copy_tokenizer(adapter.folder, folder)


def _fold(adapter: AdapterFiles, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Factors of one rank and one scaling; the config is changed to say so."""
    rank, scaling = shared_scaling(adapter)
    alpha = scaling * rank
    is_whole = abs(alpha - round(alpha)) < 1e-9 * max(1.0, abs(alpha))
    config.r, config.use_rslora = rank, False
    config.lora_alpha = round(alpha) if is_whole else alpha
    config.rank_pattern, config.alpha_pattern = {}, {}
    pairs = read_pairs(adapter, scaling=config.lora_alpha / rank, rank=rank)
    return {
        key: value for one in pairs for key, value in ((one.pair.a, one.a), (one.pair.b, one.b))
    }
