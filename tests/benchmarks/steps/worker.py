"""One rank of one implementation: builds its model, then steps each time it is told to.

    python -m tests.benchmarks.steps.worker IMPLEMENTATION SETTINGS

Reads lines from stdin, writes one line of JSON for each to stdout. Imports of transformers and
peft are those of the interpreter that runs it; of tplora only what needs torch alone, but for the
implementation of that name.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.benchmarks.steps.dtensor_lora import parallelize, reduce_partial_gradients
from tplora.rehearsal.live_bytes import LiveBytes
from tplora.rehearsal.recorded import Recorded


def build(name: str, settings: dict[str, Any], world_size: int) -> Any:
    """The adapted model; its trained parameters require gradients, no others do."""
    path, r = settings["path"], settings["r"]
    if name == "tplora":
        from peft import LoraConfig  # noqa: PLC0415

        from tplora.adapter.attach import attach_adapter  # noqa: PLC0415
        from tplora.base.load import load_base  # noqa: PLC0415

        base = load_base(path, tp_size=world_size, dtype=torch.float32)
        return attach_adapter(base, _config(LoraConfig, r))
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    options: dict[str, Any] = {"dtype": torch.float32}
    if name == "stock":
        from transformers import DistributedConfig  # noqa: PLC0415

        options["distributed_config"] = DistributedConfig(tp_size=world_size)
    base = AutoModelForCausalLM.from_pretrained(path, **options).requires_grad_(False)
    if name == "dtensor":
        for layer in base.model.layers:
            layer.self_attn.config = base.config
        return parallelize(base, init_device_mesh("cpu", (world_size,)), r)
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    return get_peft_model(base, _config(LoraConfig, r))


def _config(kind: Any, r: int) -> Any:
    settings = {"r": r, "lora_alpha": 2 * r, "target_modules": "all-linear"}
    return kind(**settings, task_type="CAUSAL_LM")


class Stepper:
    """Forward with labels, backward, AdamW by torch's own means; tplora's as its trainer has it."""

    def __init__(self, model: Any, settings: dict[str, Any]) -> None:
        self.model = model.train()
        vocab = model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(1)
        shape = (settings["rows"], settings["length"])
        self.tokens = torch.randint(0, vocab, shape, generator=draw)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)
        if getattr(model, "mesh", None) is not None:
            from tplora.train.local_steps import step_on_pieces  # noqa: PLC0415

            step_on_pieces(self.optimizer, model.factors().values())

    def __call__(self) -> float:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        reduce_partial_gradients(self.trained)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def held(self) -> int:
        return sum(_local(p).nbytes for p in self.model.parameters())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _answer(stepper: Stepper, asked: str) -> dict[str, Any]:
    if asked == "count":
        with Recorded() as said:
            stepper()
        with LiveBytes() as live:
            stepper()
        return {
            "collectives": len(said.calls),
            "bytes": sum(n for _, n in said.calls),
            "made_bytes": live.peak,
            "held_bytes": stepper.held(),
        }
    start = time.perf_counter()
    loss = stepper()
    return {"seconds": time.perf_counter() - start, "loss": loss}


def main() -> None:
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    tell: Callable[[object], None] = _own_stdout()
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    stepper = Stepper(build(name, settings, world_size), settings)
    tell("ready")
    for line in sys.stdin:
        tell(_answer(stepper, line.strip()))
    if world_size > 1:
        dist.destroy_process_group()


def _own_stdout() -> Callable[[object], None]:
    """What libraries print goes to stderr; only answers go where the driver reads."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda value: print(json.dumps(value), file=answers, flush=True)


if __name__ == "__main__":
    main()
