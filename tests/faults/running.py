"""A run of two forked ranks in which something goes wrong, and what it leaves behind.

The ranks go through all that ``tplora finetune`` does in a rank; what a launcher does when one of
them dies, ending the others, the world does.
"""

import contextlib
import errno
import io
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import load_file

from tests.merging import merge_one
from tests.run.test_finetune import RECIPE, chat
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tplora.recipe.check import read_recipe
from tplora.run.finetune import run_finetune
from tplora.run.start import Start
from tplora.train.checkpoint_files import check_checkpoint
from tplora.train.trainer import TploraSFTTrainer

MAX_STEPS = 6


def write_place(folder: Path) -> Path:
    """A folder with a recipe of six steps that saves every two of them, a base and rows.

    The fourth step is the last of an epoch, and short.
    """
    write_checkpoint("llama", folder / "base", vocab_size=512, max_position_embeddings=256)
    tiny_tokenizer().save_pretrained(folder / "base")
    recipe = RECIPE.replace("max_steps = 4", f"max_steps = {MAX_STEPS}")
    recipe = recipe.replace("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1")
    saving = 'save_strategy = "steps"\nsave_steps = 2\nsave_total_limit = 2\n'
    (folder / "recipe.toml").write_text(recipe + saving)
    (folder / "unsaved.toml").write_text(recipe + "save_only_model = true\n")
    (folder / "train.jsonl").write_text("\n".join(chat(n) for n in range(7)) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(chat(n) for n in range(20, 22)) + "\n")
    return folder


def finetune(
    place: Path,
    run: Path,
    fault: tuple[object, ...] = (),
    start: Start | None = None,
    recipe_name: str = "recipe.toml",
) -> str:
    """One rank's part; the error that ended it, if one did."""
    recipe = read_recipe(place / recipe_name, [])
    with ExitStack() as stack:
        stack.enter_context(mock.patch("tplora.run.finetune.leave_process_group"))
        if fault:
            name, rank, *arguments = fault
            if rank in (dist.get_rank(), "all"):
                stack.enter_context(_FAULTS[str(name)](*arguments))
        try:
            run_finetune(recipe, run, start=start)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def export(place: Path, adapter: Path, merged: Path, fault: tuple[object, ...] = ()) -> None:
    """What ``tplora export`` does."""
    with _FAULTS[str(fault[0])](*fault[1:]) if fault else contextlib.nullcontext():
        merge_one(str(place / "base"), adapter, merged)


# ---- faults, each a context on the rank that has it


@contextlib.contextmanager
def _at_step(step: int, act: Callable[[TploraSFTTrainer], None]):
    before = TploraSFTTrainer.training_step

    def training_step(self, *args):
        if self.state.global_step + 1 == step:
            act(self)
        return before(self, *args)

    with mock.patch.object(TploraSFTTrainer, "training_step", training_step):
        yield


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_at(step: int):
    return _at_step(step, lambda trainer: _die())


@contextlib.contextmanager
def _killed_after(seed: int, most_s: float):
    """At a moment that has nothing to do with what the rank is doing."""
    timer = threading.Timer(random.Random(seed).uniform(0, most_s), _die)
    timer.daemon = True
    begin = TploraSFTTrainer.train

    def train(self, *args, **kwargs):
        timer.start()
        return begin(self, *args, **kwargs)

    with mock.patch.object(TploraSFTTrainer, "train", train):
        yield
    timer.cancel()


def _killed_in(function: str, call: int = 1, half: bool = False):
    """When ``function`` is called for that time; ``half``: with half a file written."""
    calls = []

    def dies(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            if half:
                Path(args[1]).write_bytes(b"half")
            _die()
        return real(*args, **kwargs)

    patched = mock.patch(function, dies)
    real = patched.get_original()[0]
    return patched


def _asked_to_end(step: int):
    return _at_step(step, lambda trainer: os.kill(os.getpid(), signal.SIGTERM))


def _poisoned(step: int, which: str):
    """One number of one gradient is not one, before ranks sum their parts."""

    def poison(trainer):
        factor = next(f for n, f in trainer.model.factors().items() if which in n)
        factor.local().register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.nan))

    return _at_step(step, poison)


@contextlib.contextmanager
def _fed_otherwise(step: int):
    before = TploraSFTTrainer.training_step

    def training_step(self, model, inputs, *args):
        if self.state.global_step + 1 == step:
            inputs = inputs | {"input_ids": inputs["input_ids"].flip(0)}
        return before(self, model, inputs, *args)

    with mock.patch.object(TploraSFTTrainer, "training_step", training_step):
        yield


@contextlib.contextmanager
def _disk_full(function: str, call: int = 1):
    """Half of what ``function`` writes fits."""
    calls = []

    def fails(value, file, *args, **kwargs):
        calls.append(None)
        if len(calls) < call:
            return real(value, file, *args, **kwargs)
        Path(file).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    patched = mock.patch(function, fails)
    real = patched.get_original()[0]
    with patched:
        yield


@contextlib.contextmanager
def _small_files(num_bytes: int):
    """The kernel refuses to let a file grow beyond that, as a full disk would.

    Of this process any file: also that through which its world meets, and what it says into one.
    """
    import resource  # noqa: PLC0415  not on every system

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def _slow_disk(seconds: float, timeout_s: float, is_patient: bool = True):
    """One write of an optimizer's state takes longer than a collective of the world may."""
    real, slow = torch.save, ["optimizer.pt"]

    def saved_slowly(value, file, *args, **kwargs):
        if Path(file).name in slow:
            slow.clear()
            time.sleep(seconds)
        real(value, file, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.save", saved_slowly))
        if not is_patient:
            world = mock.patch("tplora.mesh._patient_group", return_value=dist.group.WORLD)
            stack.enter_context(world)
        c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        stack.callback(c10d._set_pg_timeout, timedelta(seconds=60))
        yield


_FAULTS = {
    "killed at": _killed_at,
    "killed after": _killed_after,
    "killed in": _killed_in,
    "asked to end": _asked_to_end,
    "poisoned": _poisoned,
    "fed otherwise": _fed_otherwise,
    "disk full": _disk_full,
    "small files": _small_files,
    "slow disk": _slow_disk,
}


# ---- what is left


def assert_nothing_is_half(run: Path) -> None:
    """Whatever can be seen in a run's folder is whole."""
    for checkpoint in run.glob("checkpoint-*"):
        check_checkpoint(checkpoint)
    if (run / "adapter").exists():
        assert load_file(run / "adapter" / "adapter_model.safetensors")
        json.loads((run / "adapter" / "adapter_config.json").read_text())
        assert (run / "adapter" / "tokenizer.json").is_file()


def adapter_bytes(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def assert_ended_like(run: Path, whole: Path) -> None:
    """The adapter to the bit, the numbers of every step, and nothing left over."""
    assert adapter_bytes(run) == adapter_bytes(whole)
    assert _numbers(run) == _numbers(whole)
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}


def _numbers(run: Path) -> list[dict[str, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = {"tokens_per_s", "peak_bytes"}
    return [{k: v for k, v in record.items() if k not in clock} for record in records]
