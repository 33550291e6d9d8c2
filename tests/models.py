"""Whole tiny models, trained a few steps: by plain PEFT or tplora alone, then by tplora on P ranks.

The run alone is recorded in a file, number by number. The same run on P ranks meets every number in
the same order and compares its own piece of it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import GradientState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from tests.parity import assert_is_shard
from tests.tiny import VOCAB
from tplora.adapter.attach import attach_adapter
from tplora.adapter.model import TploraModel
from tplora.base.load import check_shards, load_base

HEADS = (24, 12)
"""Attention and key-value heads that 2, 3 and 4 divide: one reference serves all."""
CUT = {"heads": HEADS, "head_dim": 4}
SEED = 7
STEPS = 10
EAGER = {"experts_implementation": "eager"}
"""A grouped matmul takes no float64."""
MAX_NORM = 0.05
"""Below every gradient norm of these models, so that clipping bites at each step."""

TARGETS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "ends": {"target_modules": ["lm_head", "embed_tokens", "o_proj"]},
    "query": {"target_modules": ["q_proj"]},
    "fused-query": {"target_modules": ["qkv_proj"]},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"o_proj": 3, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"down_proj": 5},
        "use_rslora": True,
    },
}


@dataclass(frozen=True)
class Case:
    """One run. Plain values: it travels to the ranks."""

    targets: str = "all-linear"
    dropout: float = 0.0
    checkpointing: str | None = None
    """None, "reentrant", "non-reentrant" or "keeping": the sums of each layer."""
    is_reduced_each_backward: bool = False
    """True outside accelerate, where every backward is taken for the last of its step."""
    planted: tuple[int, ...] = ()
    """Tokens that occur once in each of the first two rows, at different places."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Further settings of the LoRA config."""
    lr: float = 1e-2
    is_cut: bool = False
    """Whether ranks share out the tokens between attention and MLP."""

    def __str__(self) -> str:
        parts = [self.targets]
        parts += [f"dropout{self.dropout:g}"] if self.dropout else []
        parts += [self.checkpointing] if self.checkpointing else []
        parts += ["each-backward"] if self.is_reduced_each_backward else []
        parts += ["cut"] if self.is_cut else []
        return "-".join(parts)

    def alone(self) -> "Case":
        """The run that this one must equal: what only saves memory or time left out."""
        return replace(self, checkpointing=None, is_reduced_each_backward=False, is_cut=False)


class InDouble(TorchFunctionMode):
    """While open, float64 stays float64.

    Models compute norms, softmax and loss in float32, whatever they are loaded in. There one unit
    of rounding, 6e-8, hides what a parity test looks for and drifts over ten steps.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def lora(targets: str = "all-linear", *, dropout: float = 0.0, **changes: Any) -> LoraConfig:
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": dropout, "task_type": "CAUSAL_LM"}
    return LoraConfig(**settings | TARGETS[targets] | changes)


def load(
    path: str, config: LoraConfig, *, dtype: torch.dtype = torch.float64, is_cut: bool = False
) -> TploraModel:
    """A tplora model over this rank's whole world; in a world of 1, alone."""
    base = load_base(path, tp_size=world_size(), dtype=dtype, **EAGER)
    model = attach_adapter(base, config, seed=SEED, sequence_parallel=is_cut)
    return model.train()


def load_plain(path: str, config: LoraConfig, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Plain PEFT in this process alone, with factors drawn as tplora promises to draw them."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **EAGER)
    torch.manual_seed(SEED)
    return get_peft_model(base, config).train()


def batches(step: int, planted: tuple[int, ...] = ()) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches of a step: three rows with padding on both sides, then one odd row."""
    generator = torch.Generator().manual_seed(100 + step)
    found = []
    for shape in ((3, 9), (1, 7)):
        tokens = torch.randint(3, VOCAB, shape, generator=generator)
        for row in range(min(2, shape[0])):
            tokens[row, 2 + row : 2 + row + len(planted)] = torch.tensor(planted, dtype=torch.long)
        mask = torch.ones_like(tokens)
        if shape[0] > 1:
            mask[1, -2:] = 0
            mask[2, :3] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        labels[:, :2] = -100
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


See = Callable[[str, torch.Tensor], None]


def train(model: nn.Module, case: Case, see: See, *, num_steps: int = STEPS) -> None:
    """Two micro-batches a step, clipping and AdamW by torch's own means; ``see`` every number."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    _enable_checkpointing(model, case.checkpointing)
    for name, parameter in trained.items():
        see(f"{name} before step 1", parameter)
    optimizer = torch.optim.AdamW(trained.values(), lr=case.lr, foreach=True)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        for k, batch in enumerate(batches(step, case.planted)):
            with _accumulating(case, is_last=k == 1):
                with InDouble():
                    loss = model(**batch).loss / 2
                loss.backward()
            see(f"step {step}: loss {k}", loss)
        for name, parameter in trained.items():
            assert parameter.grad is not None, f"step {step}: grad of {name}: missing"
            see(f"step {step}: grad of {name}", parameter.grad)
        norm = nn.utils.clip_grad_norm_(list(trained.values()), MAX_NORM)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        see(f"step {step}: gradient norm", norm)
        assert norm > MAX_NORM, f"step {step}: clipping to {MAX_NORM} does not bite {norm:.3g}"
        optimizer.step()
    for name, parameter in trained.items():
        see(f"{name} after step {num_steps}", parameter)


@contextlib.contextmanager
def _accumulating(case: Case, *, is_last: bool) -> Iterator[None]:
    """What ``accelerator.accumulate`` tells: whether this backward is the last of its step."""
    GradientState()._set_sync_gradients(is_last or case.is_reduced_each_backward)
    try:
        yield
    finally:
        GradientState()._set_sync_gradients(True)


def _enable_checkpointing(model: nn.Module, kind: str | None) -> None:
    if kind is None:
        return
    base = model.get_base_model()
    if kind == "keeping":
        model.activation_checkpointing_enable({"keep_reduced_outputs": True})
    else:
        base.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    if kind == "reentrant":
        base.enable_input_require_grads()
    compute_again_in_double(base)


def compute_again_in_double(base: nn.Module) -> None:
    """Backward has torch close the mode: layers open it themselves."""
    for module in (part for layer in base.model.layers for part in layer.children()):
        module.forward = in_double(module.forward)


def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    """For what is computed again in backward, where torch has closed the mode."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return forward(*args, **kwargs)

    return wrapped


def record_run(path: str, case: Case, file: Path, *, is_plain: bool) -> None:
    """Train alone and write every number to ``file``. Runs in a world of 1."""
    config = lora(case.targets, dropout=case.dropout, **case.changes)
    model = load_plain(path, config) if is_plain else load(path, config)
    seen: dict[str, torch.Tensor] = {}
    train(model, case, lambda what, tensor: seen.update({what: tensor.detach().clone()}))
    save_file(seen, file)


def compare_run(path: str, case: Case, file: Path) -> TploraModel:
    """Train on this world's ranks and compare this rank's piece of every number with ``file``'s."""
    seen = load_file(file)
    config = lora(case.targets, dropout=case.dropout, **case.changes)
    model = load(path, config, is_cut=case.is_cut)
    check_shards(model.get_base_model(), model.plan)
    train(model, case, lambda what, tensor: _compare(what, tensor, seen.pop(what)))
    assert not seen, f"never seen here: {sorted(seen)}"
    return model


def differences(path: str, case: Case, file: Path) -> list[str]:
    """What ``compare_run`` would say of each number of one step, all of them, on this rank.

    For runs that are broken on purpose: a rank that raised would leave its peers in a collective.
    """
    seen, found = load_file(file), []

    def see(what: str, tensor: torch.Tensor) -> None:
        try:
            if what in seen:
                _compare(what, tensor, seen[what])
        except AssertionError as error:
            found.append(str(error))

    config = lora(case.targets, dropout=case.dropout, **case.changes)
    model = load(path, config, is_cut=case.is_cut)
    train(model, case, see, num_steps=1)
    return found


def _compare(what: str, tensor: torch.Tensor, full: torch.Tensor) -> None:
    placement = tensor.placements[0] if isinstance(tensor, DTensor) else None
    if isinstance(tensor, DTensor):
        assert not placement.is_partial(), f"{what}: still a partial sum"
    assert_is_shard(
        shard=tensor.detach(),
        full=full,
        dim=placement.dim if isinstance(placement, Shard) else None,
        what=what,
        is_exact=what.endswith("before step 1") and "magnitude" not in what,
    )
