"""One architecture held to plain PEFT in one process, from base to merged model; runs in a rank.

Every rank computes the truth for itself, from the same checkpoint, and compares with it what the
ranks compute together.
"""

import copy
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zoo.build import VOCAB
from tests.zoo.double import Double
from tests.zoo.packing import LENGTHS, joined, tokens
from tplora.adapter.attach import attach_adapter
from tplora.adapter.config import file_config
from tplora.adapter.dropout import ForwardSeed
from tplora.adapter.factor import shard_full
from tplora.base.load import check_shards, load_base
from tplora.plan.build import build_plan
from tplora.plan.facts import read_facts
from tplora.upstream import build_meta_model, local_shard, peft_refusal
from tplora.upstream.peft_keys import peft_file_keys

OPTIONS = {"dtype": torch.float64, "experts_implementation": "eager"}


def everything(config, every: int = 1) -> LoraConfig:
    """LoRA on every linear, embedding, head, router and stack of experts that PEFT can adapt.

    Args:
        config: The architecture.
        every: Of the modules only each so manyth, by name.
    """
    model = build_meta_model(copy.deepcopy(config), trust_remote_code=False)
    facts = read_facts(model)
    head = model.get_output_embeddings()  # of a tied model, not among its parameters
    modules = {m.name for m in facts.modules if m.kind or model.get_submodule(m.name) is head}
    lora = LoraConfig(target_modules=["x"])
    keys = {name: f"base_model.model.{name}.lora_A.weight" for name in modules}
    readable = peft_file_keys(model, lora, keys.values())
    fit = {n for n in modules if readable[keys[n]] and peft_refusal(lora, model, n) is None}
    stacks = [p.name for role in ("experts", "router") for p in facts.with_role(role)]
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=sorted(fit)[::every],
        target_parameters=sorted(stacks) or None,
        task_type="CAUSAL_LM",
    )


def batches(vocab: int = VOCAB) -> list[dict[str, torch.Tensor | None]]:
    """A whole batch, one with padding, one of odd sizes."""
    draw = torch.Generator().manual_seed(3)
    found = []
    for rows, length, is_padded in ((4, 16, False), (4, 16, True), (3, 15, False)):
        ids = torch.randint(3, vocab, (rows, length), generator=draw)
        mask = torch.ones_like(ids)
        if is_padded:  # shorter than a sliding window: a query with nothing to see is NaN
            mask[1, 11:] = mask[3, 9:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


class Pair:
    """The model on tp_size ranks, the truth in this process, and how far they were apart."""

    def __init__(self, path: str, tp_size: int, lora: LoraConfig, *, is_cut: bool = False) -> None:
        self.path, self.worst = path, {}
        config = AutoConfig.from_pretrained(path)
        plan = build_plan(config, copy.deepcopy(lora), tp_size=tp_size, sequence_parallel=is_cut)
        base = load_base(path, tp_size=tp_size, **OPTIONS)
        check_shards(base, plan)
        self.model = attach_adapter(base, copy.deepcopy(lora), plan=plan)
        plain = self._plain()
        self.truth = get_peft_model(plain, file_config(lora, plan.layers, plain))
        seed = ForwardSeed(self.model.seed)  # for routers that draw in training
        self.truth.base_model.register_forward_pre_hook(seed.enter)
        self.truth.base_model.register_forward_hook(seed.leave, always_call=True)
        self.factors = self.model.factors()
        self.parameters = {n: p for n, p in self.truth.named_parameters() if p.requires_grad}
        assert set(self.factors) == set(self.parameters)

    def _plain(self):
        return AutoModelForCausalLM.from_pretrained(self.path, **OPTIONS)

    def note(self, kind: str, found, wanted, what: str = "", floor: float = 0.0) -> None:
        """Keep the largest relative difference of each kind."""
        scale = max(float(wanted.norm()), floor, 1e-300)
        error = float((found - wanted).norm()) / scale
        if not error <= self.worst.get(kind, (-1.0,))[0]:  # NaN is the worst
            self.worst[kind] = (error, what)

    def draw_factors(self) -> None:
        """The same random values in both: with B at zero a first step proves little."""
        draw = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, factor in self.factors.items():
                full = self.parameters[name].normal_(std=0.1, generator=draw)
                local_shard(factor.parameter).copy_(shard_full(full, factor.plan, factor.mesh))

    def train(self, data) -> None:
        """One AdamW step per batch."""
        self.model.train(), self.truth.train()
        ours = [self.factors[name].parameter for name in self.factors]
        theirs = [self.parameters[name] for name in self.factors]
        sides = [
            (one, torch.optim.AdamW(p, lr=1e-3))
            for one, p in ((self.model, ours), (self.truth, theirs))
        ]
        for step, batch in enumerate(data):
            losses = []
            for one, optimizer in sides:
                optimizer.zero_grad()
                losses.append(one(**batch, use_cache=False).loss)
                losses[-1].backward()
            self.note("loss", _full(losses[0]), losses[1].detach(), f"step {step}")
            self._compare_gradients(step)
            for _, optimizer in sides:
                optimizer.step()
        for name, factor in self.factors.items():
            self.note("factor", _full(factor.parameter), self.parameters[name].detach(), name)

    def _compare_gradients(self, step: int) -> None:
        largest = max(float(p.grad.norm()) for p in self.parameters.values() if p.grad is not None)
        assert largest > 0, "no gradient at all"
        num_compared = 0
        for name, factor in self.factors.items():
            here, there = factor.parameter.grad, self.parameters[name].grad
            if here is None and there is None:
                continue  # a layer whose output this model drops
            zero = torch.zeros_like(self.parameters[name])
            here = zero if here is None else _full(here)
            there = zero if there is None else there
            self.note(
                "gradient" if step == 0 else "later gradient",
                here,
                there,
                f"step {step} of {name}",
                1e-7 * largest,
            )
            num_compared += 1
        assert num_compared > len(self.factors) / 5

    def compare_base(self, batch) -> None:
        """Without the adapter."""
        self.model.eval(), self.truth.eval()
        with self.model.disable_adapter(), self.truth.disable_adapter():
            self.note("base", _logits(self.model, batch), _logits(self.truth, batch))

    def compare_joined(self, vocab: int) -> None:
        """Joined rows on the ranks, and each row alone in one process."""
        self.model.eval(), self.truth.eval()
        given = tokens(vocab)
        with torch.no_grad():
            found = _full(self.model(**joined(given), use_cache=False).logits)
        for k in (2, 4):  # the longest one, and one behind a single token
            row = {"input_ids": given[k][None], "attention_mask": None}
            wanted = _logits(self.truth, row)
            self.note("joined", found.split(LENGTHS, 1)[k], wanted, f"row {k}")

    def compare_file(self, batch) -> None:
        """What was trained, the saved adapter in plain PEFT, and both of them merged."""
        self.model.eval(), self.truth.eval()
        live = _logits(self.model, batch)
        self.note("trained", live, _logits(self.truth, batch))
        folder = _shared_folder()
        self.model.save_pretrained(folder)
        again = PeftModel.from_pretrained(self._plain(), folder).eval()
        self.note("reloaded", _logits(again, batch), live)
        merged = again.merge_and_unload()
        self.model.merge_adapter()
        self.note("merged", _logits(self.model, batch), _logits(merged, batch))
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)


def deviations(
    path: str,
    tp_size: int,
    vocab: int = VOCAB,
    *,
    packs: bool = False,
    every: int = 1,
    is_cut: bool = False,
) -> dict[str, tuple[float, str]]:
    """The largest relative difference of each kind, and where it was.

    Args:
        path: A checkpoint.
        tp_size: Ranks.
        vocab: Tokens to draw from.
        packs: Whether rows are joined.
        every: Of how many linears one is adapted; see ``everything``.
        is_cut: Whether ranks share out the tokens between attention and MLP.
    """
    with Double():
        config = everything(AutoConfig.from_pretrained(path), every)
        pair = Pair(path, tp_size, config, is_cut=is_cut)
        data = batches(vocab)
        pair.compare_base(data[1])
        pair.draw_factors()
        if packs:
            pair.compare_joined(vocab)
        pair.train(data)
        pair.compare_file(data[1])
    return pair.worst


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _logits(model, batch) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        return _full(model(**inputs, use_cache=False).logits)


def _shared_folder() -> Path:
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, src=0)
    return Path(told[0])
