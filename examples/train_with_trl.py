"""tplora in ten lines, under trl's own SFTTrainer.

    torchrun --nproc-per-node 2 examples/train_with_trl.py MODEL OUT

MODEL is a folder or a hub id. On GPUs each process takes one; without, the processes share the CPU.
"""

import sys

from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

import tplora


def main(model_path: str, out: str) -> None:
    processes = tplora.current_processes()
    device = tplora.join_process_group(processes)

    base = tplora.load_base(model_path, tp_size=processes.world_size, device=device)
    model = tplora.attach_adapter(base, LoraConfig(r=8, target_modules="all-linear"))

    rows = Dataset.from_list(
        [{"prompt": f"{n} + {n} =", "completion": f" {2 * n}"} for n in range(40)]
    )
    args = SFTConfig(
        output_dir=out,
        parallelism_config=tplora.parallelism_config(model),
        use_cpu=device.type == "cpu",
        bf16=False,
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    SFTTrainer(model=model, args=args, train_dataset=rows).train()
    tplora.save_adapter(model, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
