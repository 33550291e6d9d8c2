"""A checkpoint's folder on disk: whether it is whole, which is the last one that is, what it says.

The folder is transformers' own, so that a plain Trainer in one process reads it, and this reads
that one's.
"""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from tplora.errors import ArtifactError
from tplora.upstream import load_rng_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from peft import LoraConfig

__all__ = [
    "OPTIMIZER",
    "RNG",
    "SCHEDULER",
    "STATE",
    "check_checkpoint",
    "check_same_adapter",
    "find_best_step",
    "find_last_checkpoint",
    "load_plain_file",
    "read_state",
]

OPTIMIZER, SCHEDULER, RNG, STATE = (
    "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
)  # fmt: skip
_CONFIG, _FACTORS = "adapter_config.json", "adapter_model.safetensors"
# What decides a run's numbers and shows in no shape.
_SETTINGS = ("lora_alpha", "alpha_pattern", "use_rslora", "lora_dropout")


def find_last_checkpoint(
    folder: Path, *, say: Callable[[str], None] = lambda message: None
) -> Path | None:
    """The checkpoint of the highest step that is whole; damaged ones are said, and stay.

    Args:
        folder: A trainer's output folder, the folder of a run.
        say: Called with one line for each checkpoint that is passed over.
    """
    for path in _last_first(folder):
        damage = _find_damage(path)
        if damage is None:
            return path
        say(f"{path}: passed over: {damage}")
    return None


def find_best_step(folder: Path) -> int | None:
    """The best step of a run, as its last checkpoint that can be read says; None if none does."""
    for path in _last_first(folder):
        try:
            step = read_state(path).get("best_global_step")
        except (OSError, ValueError):
            continue
        return step if type(step) is int else None
    return None


def check_checkpoint(folder: Path) -> None:
    """Read every byte of it once.

    Raises:
        ArtifactError: With what is missing or damaged.
    """
    damage = _find_damage(folder)
    if damage is not None:
        raise ArtifactError(
            f"{folder}: cannot be resumed: {damage}; name another checkpoint of the run, or start "
            "it anew"
        )


def read_state(folder: Path) -> dict[str, Any]:
    """What ``trainer_state.json`` says; the folder has been checked."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return state


def load_plain_file(path: Path) -> Any:
    """Tensors and plain values, on the CPU; a file that would run code is refused by torch."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def check_same_adapter(folder: Path, config: LoraConfig) -> None:
    """Names and shapes are compared where factors are filled; this is what they do not show.

    Raises:
        ArtifactError: Naming the first setting that differs.
    """
    saved = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    for name in _SETTINGS:
        was, now = saved.get(name), getattr(config, name)
        if (was or 0) != (now or 0):
            raise ArtifactError(
                f"{folder / _CONFIG}: {name} was {was}, this adapter's is {now}; resume with the "
                "adapter that was trained"
            )


def _last_first(folder: Path) -> list[Path]:
    found = {path: path.name.partition("-")[2] for path in folder.glob("checkpoint-*")}
    steps = {path: int(step) for path, step in found.items() if step.isdigit() and path.is_dir()}
    return sorted(steps, key=lambda path: steps[path], reverse=True)


def _find_damage(folder: Path) -> str | None:
    if not folder.is_dir():
        return "there is no such folder"
    missing = [name for name in _READ if not (folder / name).is_file()]
    if missing:
        hint = "; was it saved with save_only_model?" if OPTIMIZER in missing else ""
        return f"has no {', '.join(missing)}{hint}"
    for name, read in _READ.items():
        try:
            read(folder / name)
        except Exception as error:  # readers raise what they like at bytes that are not theirs
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            return f"{name} is damaged ({reason})"
    return None


def _read_object(path: Path) -> Mapping[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _read_progress(path: Path) -> None:
    step = _read_object(path).get("global_step")
    if type(step) is not int or step < 1:
        raise ValueError(f"global_step is {step}")


def _read_factors(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is no dict
            if not bool(torch.isfinite(file.get_tensor(name)).all()):
                raise ValueError(f"{name} is not finite")


def _read_archive(path: Path) -> None:
    """torch.load does not compare the sums that torch.save has written."""
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise ValueError(f"{bad} is not what was written")


def _read_optimizer(path: Path) -> None:
    _read_archive(path)
    found = load_plain_file(path)
    if not {"state", "param_groups"} <= set(found):
        raise ValueError("not the state of an optimizer")


def _read_scheduler(path: Path) -> None:
    _read_archive(path)
    load_plain_file(path)


def _read_rng(path: Path) -> None:
    _read_archive(path)
    if not {"python", "numpy", "cpu"} <= set(load_rng_file(path)):
        raise ValueError("not the states of the random generators")


_READ: Mapping[str, Callable[[Path], object]] = {
    _CONFIG: _read_object,
    STATE: _read_progress,
    _FACTORS: _read_factors,
    OPTIMIZER: _read_optimizer,
    SCHEDULER: _read_scheduler,
    RNG: _read_rng,
}
"""Every file that a resumed run needs, the short ones first."""
