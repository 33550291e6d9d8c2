"""What a model says at the end of training, kept so that others can be asked to say the same.

A probe file holds a few rows of tokens and the full logits at the last positions of each:

    input_ids       int64   [N, T]      rows, padded with 0 on the right
    attention_mask  int64   [N, T]      1 for a token, 0 for padding
    positions       int64   [N, K]      where the logits were taken
    logits          float32 [N, K, V]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from tplora.errors import ArtifactError
from tplora.files import file_written_aside

__all__ = ["Probe", "choose_probe_rows", "logits_at", "read_probe", "record_probe"]

NUM_ROWS, NUM_TOKENS, NUM_POSITIONS = 4, 64, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A probe file in memory."""

    rows: tuple[tuple[int, ...], ...]
    """Token ids without padding."""
    positions: torch.Tensor
    logits: torch.Tensor


def choose_probe_rows(token_rows: Iterable[Sequence[int]]) -> list[list[int]]:
    """The first rows with as many tokens as positions are asked of, cut to the first 64 tokens.

    Raises:
        ArtifactError: If no row is long enough.
    """
    chosen: list[list[int]] = []
    for row in token_rows:
        if len(chosen) == NUM_ROWS:
            break
        if len(row) >= NUM_POSITIONS:
            chosen.append([int(token) for token in row[:NUM_TOKENS]])
    if not chosen:
        raise ArtifactError(
            f"probe: no row has {NUM_POSITIONS} tokens; at least one is needed to verify with"
        )
    return chosen


def record_probe(
    model: nn.Module, probe_rows: Sequence[Sequence[int]], path: Path, *, is_writer: bool
) -> None:
    """Run the rows through the model as it is and keep what it says, replacing an older probe.

    Collective: every rank that holds a piece of the model calls it with the same rows; the rank
    with ``is_writer`` writes.

    Raises:
        ArtifactError: If a logit is not finite or the file cannot be written.
    """
    positions = torch.tensor(
        [range(len(row) - NUM_POSITIONS, len(row)) for row in probe_rows], dtype=torch.int64
    )
    logits = logits_at(model, probe_rows, positions)
    if not torch.isfinite(logits).all():
        raise ArtifactError(
            f"{path}: the model's logits are not finite; take an earlier checkpoint or train with "
            "a lower learning rate"
        )
    if not is_writer:
        return
    longest = max(len(row) for row in probe_rows)
    input_ids = torch.zeros(len(probe_rows), longest, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for k, row in enumerate(probe_rows):
        input_ids[k, : len(row)] = torch.tensor(row)
        attention_mask[k, : len(row)] = 1
    with file_written_aside(path, overwrite=True) as aside:
        save_file(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "positions": positions,
                "logits": logits,
            },
            aside,
        )


def read_probe(path: Path) -> Probe:
    """Read a probe file.

    Raises:
        ArtifactError: If it is missing, damaged or not of this form.
    """
    if not path.is_file():
        raise ArtifactError(
            f"{path}: is missing; it is written at the end of training, name a finished run"
        )
    try:
        tensors = load_file(path)
        lengths = tensors["attention_mask"].sum(dim=1).tolist()
        rows = [
            row[:length] for row, length in zip(tensors["input_ids"].tolist(), lengths, strict=True)
        ]
        positions, logits = tensors["positions"], tensors["logits"]
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path}: is not a probe ({error}); record it again") from error
    if logits.shape[:2] != positions.shape or not torch.isfinite(logits).all():
        raise ArtifactError(f"{path}: positions and logits do not belong together; record it again")
    return Probe(rows=tuple(tuple(row) for row in rows), positions=positions, logits=logits)


def logits_at(
    model: nn.Module, rows: Sequence[Sequence[int]], positions: torch.Tensor
) -> torch.Tensor:
    """float32 logits ``[N, K, V]`` on the CPU, one row at a time and so without padding.

    Collective where the model is. The model computes in eval mode, without gradients, and is left
    in the mode it was in.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = [
                _full(model(input_ids=torch.tensor([row], device=device), use_cache=False).logits)[
                    0
                ]
                for row in rows
            ]
    finally:
        model.train(was_training)
    picked = [logits[where.to(device)] for logits, where in zip(found, positions, strict=True)]
    return torch.stack(picked).float().cpu()


def _full(logits: torch.Tensor) -> torch.Tensor:
    """Gather a head's output that is still split over the vocabulary."""
    return logits.full_tensor() if isinstance(logits, DTensor) else logits
