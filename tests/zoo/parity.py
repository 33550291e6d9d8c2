"""One architecture held to plain PEFT in one process, from base to merged model; runs in a rank."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.zoo.build import VOCAB
from tplora.adapter.attach import attach_adapter
from tplora.adapter.config import file_config
from tplora.adapter.factor import shard_full
from tplora.base.load import check_shards, load_base
from tplora.plan.build import build_plan
from tplora.plan.facts import read_facts
from tplora.upstream import build_meta_model, local_shard, peft_refusal

OPTIONS = {"dtype": torch.float64, "experts_implementation": "eager"}
NUM_STEPS = 3


def everything(config) -> LoraConfig:
    """LoRA on every linear, embedding, head, router and stack of experts."""
    model = build_meta_model(copy.deepcopy(config), trust_remote_code=False)
    facts = read_facts(model)
    probe = LoraConfig(target_modules=["x"])
    modules = {
        p.module_name for role in ("linear", "head", "embedding") for p in facts.with_role(role)
    }
    modules |= {
        m.name
        for m in facts.modules
        if m.kind and model.get_submodule(m.name) is model.get_output_embeddings()
    }
    parameters = [p.name for role in ("experts", "router") for p in facts.with_role(role)]
    modules -= {name for name in modules if name.endswith("sconv.weight_proj")}  # peft cannot read
    return LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=sorted(n for n in modules if peft_refusal(probe, model, n) is None),
        target_parameters=sorted(parameters) or None,
        task_type="CAUSAL_LM",
    )


def batches():
    """A whole batch, one with padding on the right, one of odd sizes."""
    draw = torch.Generator().manual_seed(3)
    for rows, length in ((4, 16), (4, 16), (3, 15)):
        ids = torch.randint(3, VOCAB, (rows, length), generator=draw)
        mask = torch.ones_like(ids)
        if len({rows, length}) and (rows, length) == (4, 16):
            pass
        yield ids, mask


def step_batches():
    draw = torch.Generator().manual_seed(3)
    out = []
    for k, (rows, length) in enumerate(((4, 16), (4, 16), (3, 15))):
        ids = torch.randint(3, VOCAB, (rows, length), generator=draw)
        mask = torch.ones_like(ids)
        if k == 1:
            mask[1, 11:] = 0
            mask[3, 9:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        out.append({"input_ids": ids, "attention_mask": mask if k else None, "labels": labels})
    return out


def full(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


def rel(a, b, floor=0.0):
    return float((a - b).norm()) / max(float(b.norm()), floor, 1e-300)


def logits_of(model, batch):
    with torch.no_grad():
        return full(
            model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                use_cache=False,
            ).logits
        )


def run(path, tp_size=2, lora=None):
    """Every deviation, the largest of its kind."""
    worst = {}

    def note(kind, value, what=""):
        if value >= worst.get(kind, (-1.0, ""))[0]:
            worst[kind] = (value, what)

    config = AutoConfig.from_pretrained(path)
    lora = lora or everything(config)
    plan = build_plan(config, copy.deepcopy(lora), tp_size=tp_size)
    base = load_base(path, tp_size=tp_size, **OPTIONS)
    check_shards(base, plan)
    model = attach_adapter(base, copy.deepcopy(lora), plan=plan).train()
    plain = AutoModelForCausalLM.from_pretrained(path, **OPTIONS)
    truth = get_peft_model(plain, file_config(lora, plan.layers, plain)).train()
    factors, parameters = model.factors(), dict(truth.named_parameters())
    assert set(factors) == {n for n, p in parameters.items() if p.requires_grad}
    data = step_batches()
    draw = torch.Generator().manual_seed(5)
    with model.disable_adapter(), truth.disable_adapter():
        note("base", rel(logits_of(model.eval(), data[1]), logits_of(truth.eval(), data[1])))
    model.train(), truth.train()
    with torch.no_grad():
        for name, factor in factors.items():
            parameters[name].normal_(std=0.1, generator=draw)
            local_shard(factor.parameter).copy_(
                shard_full(parameters[name], factor.plan, factor.mesh)
            )
    optimizers = [
        torch.optim.AdamW([f.parameter for f in factors.values()], lr=1e-3),
        torch.optim.AdamW([parameters[n] for n in factors], lr=1e-3),
    ]
    for step, batch in enumerate(data):
        losses = []
        for one, optimizer in zip((model, truth), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            losses.append(one(**batch, use_cache=False).loss)
            losses[-1].backward()
        note(
            "loss", abs(losses[0].item() - losses[1].item()) / abs(losses[1].item()), f"step {step}"
        )
        largest = max(float(p.grad.norm()) for p in parameters.values() if p.grad is not None)
        num = 0
        for name, factor in factors.items():
            here, there = factor.parameter.grad, parameters[name].grad
            if here is None and there is None:
                continue
            num += 1
            zero = torch.zeros_like(parameters[name])
            here = zero if here is None else full(here)
            there = zero if there is None else there
            note(f"grad{step}", rel(here, there, 1e-7 * largest), name)
        note("missing", 1 - num / len(factors))
        for optimizer in optimizers:
            optimizer.step()
    for name, factor in factors.items():
        note("param", rel(full(factor.parameter), parameters[name]), name)
    model.eval(), truth.eval()
    live = logits_of(model, data[1])
    note("live", rel(live, logits_of(truth, data[1])))
    holder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder, src=0)
    folder = Path(holder[0])
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, **OPTIONS), folder
    ).eval()
    note("reloaded", rel(logits_of(again, data[1]), live))
    merged = again.merge_and_unload()
    model.merge_adapter()
    note("merged", rel(logits_of(model, data[1]), logits_of(merged, data[1])))
    return worst
