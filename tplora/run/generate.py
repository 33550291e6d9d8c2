"""Answer a prompt with a run's base and adapter, at any tp_size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, TextStreamer

from tplora.mesh import current_processes, join_process_group, leave_process_group
from tplora.run.adapted import load_adapted
from tplora.run.base import find_base
from tplora.run.folder import find_named

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from tplora.run.base import Base

__all__ = ["read_tokenizer", "run_generate"]


def run_generate(
    named: str | Path,
    prompt: str,
    *,
    max_new_tokens: int,
    tp_size: int,
    base_name: str | None = None,
) -> str:
    """Write the answer to the terminal as it comes; return it.

    Collective: every rank of the tp group calls it; the first rank writes. The most likely token
    each time, so that every tp_size gives the same answer.

    Args:
        named: A run's folder, an adapter's, or a hub id of one.
        prompt: What to answer; through the chat template if the tokenizer has one.
        max_new_tokens: Tokens to write at most.
        tp_size: Ranks that the model is cut over; any, whatever it was trained with.
        base_name: The base's folder or hub id; what the run or the adapter names when left out.
    """
    processes = current_processes()
    device = join_process_group(processes)
    run, adapter = find_named(named)
    base = find_base(run, adapter, named=base_name)
    tokenizer = read_tokenizer(adapter, base)
    model = load_adapted(adapter, base, tp_size=tp_size, device=device)
    inputs = _encode(tokenizer, prompt).to(device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with torch.no_grad():
        tokens = model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            streamer=streamer if processes.rank == 0 else None,
        )
    leave_process_group()
    answer: str = tokenizer.decode(
        tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return answer


def read_tokenizer(adapter: Path, base: Base) -> PreTrainedTokenizerBase:
    """The adapter's; the base's if none lies beside the adapter, as peft alone leaves it."""
    if any(adapter.glob("tokenizer*")):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(adapter)
    else:
        tokenizer = AutoTokenizer.from_pretrained(base.path, revision=base.revision)
    return tokenizer


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
