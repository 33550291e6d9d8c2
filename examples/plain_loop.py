"""A plain PyTorch loop over a tplora model: no trainer, gradients clipped by torch's own function.

torchrun --nproc-per-node 2 examples/plain_loop.py MODEL OUT
"""

import sys

import torch
from peft import LoraConfig
from transformers import AutoTokenizer

import tplora

TEXTS = ["the first row", "another row, a little longer", "a third one", "and the last of them"]


def main(model_path: str, out: str) -> None:
    processes = tplora.current_processes()
    device = tplora.join_process_group(processes)
    base = tplora.load_base(model_path, tp_size=processes.world_size, device=device)
    model = tplora.attach_adapter(base, LoraConfig(r=8, target_modules="all-linear"))

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(4):
        ids = tokenizer(TEXTS[step], return_tensors="pt").input_ids.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()  # partial gradients are summed over the ranks when this returns
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if processes.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {float(norm):.4f}")
    tplora.save_adapter(model, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
