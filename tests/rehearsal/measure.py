"""What a step really takes: every byte that torch's CPU allocator gave out, and took back."""

import copy
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tests.communication import Recorded
from tests.models import world_size
from tplora.adapter.attach import attach_adapter
from tplora.adapter.head.fused import install_fused_head
from tplora.base.load import load_base
from tplora.plan.step_cost import Batch, Traffic
from tplora.upstream import local_shard
from tplora.upstream.rehearsal import end_of_step


def peak_bytes(fn: Callable[[], object]) -> int:
    """The most that the allocator had given out at once since ``fn`` began.

    The profiler's own record of each allocation: what operators take inside themselves is in it.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        fn()
    events = (e for e in found.profiler.kineto_results.events() if e.name() == "[memory]")
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


class RealStep:
    """Steps of a loaded model with trl's loss and AdamW, on this rank."""

    def __init__(
        self, path, lora, batch: Batch, *, dtype=torch.float32, is_cut=False, **loading
    ) -> None:
        base = load_base(path, **{"tp_size": world_size(), "dtype": dtype} | loading)
        self.model = attach_adapter(base, lora, sequence_parallel=is_cut).train()
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        install_fused_head(base)
        if batch.is_checkpointed:
            keywords = dict(batch.checkpointing)
            every = keywords.pop("every_n_layers", 1)
            self.model.activation_checkpointing_enable(keywords, every_n_layers=every)
            self.model.enable_input_require_grads()
        self.batch, vocab = batch, base.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(3)
        shape = (batch.rows, batch.length)
        self.rows = torch.randint(0, vocab, shape, generator=draw)
        mask = torch.ones_like(self.rows)
        mask[-1, -1] = 0  # one padded place, so that attention has a mask
        self.given = {"input_ids": self.rows, "labels": self.rows, "attention_mask": mask}
        if batch.is_joined:
            places = torch.arange(batch.length).repeat(batch.rows)[None]
            rows = self.rows.view(1, -1)
            self.given = {"input_ids": rows, "labels": rows, "position_ids": places}
        if batch.reference_passes:
            self.model.add_adapter("ref", copy.deepcopy(lora))
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def forward(self) -> torch.Tensor:
        """All passes of a micro-batch; as trl's, those of the reference come last."""
        self._look(self.batch.passes_before)
        loss = self.model(**self.given, fused_lm_head=True).loss
        if self.batch.reference_passes:
            with use_adapter(self.model, "ref"):
                self._look(self.batch.reference_passes)
        return loss

    @torch.no_grad()
    def _look(self, num_passes: int) -> None:
        for _ in range(num_passes):
            self.model(**self.given, fused_lm_head=True)

    def step(self) -> None:
        if self.batch.is_accumulated:
            with end_of_step(is_last=False):
                self.forward().backward()
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def calls(self) -> tuple[list[tuple[str, int]], ...]:
        """Collectives of forward, of backward, and of the end of the step, in order."""
        with Recorded() as forward:
            loss = self.forward()
        before = 0 if self.model.sync is None else self.model.sync.num_buckets
        with Recorded() as backward:
            loss.backward()
        self.optimizer.zero_grad()
        buckets = 0 if self.model.sync is None else self.model.sync.num_buckets - before
        split = len(backward.calls) - buckets
        return forward.calls, backward.calls[:split], backward.calls[split:]

    def said(self) -> dict[str, tuple[Traffic, ...]]:
        """Collectives of a step, as ``StepCost`` has them."""
        names = ("forward", "backward", "bucket")
        return {name: Traffic.of(calls) for name, calls in zip(names, self.calls(), strict=True)}

    def resident(self) -> int:
        state = [t for s in self.optimizer.state.values() for t in s.values() if t.ndim]
        return sum(local_shard(t).nbytes for t in (*self.model.parameters(), *state))


def measure(path, lora, batch: Batch, is_cut: bool = False, **loading) -> dict[str, object]:
    """On every rank: what lives from step to step, what a step takes on top, what is said."""
    real = RealStep(path, lora, batch, is_cut=is_cut, **loading)
    said = real.said()
    real.step()  # the optimizer's state is there from now on
    # A thread of gloo may hold a reduced tensor longer than its caller does: the least is right.
    working = min(peak_bytes(real.step) for _ in range(3 if world_size() > 1 else 1))
    return {"resident": real.resident(), "working": working, **said}
