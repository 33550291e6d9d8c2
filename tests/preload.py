"""What the fork server imports once for every world: the slow modules and nothing else."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import peft
import transformers
from trl import SFTTrainer

__all__ = ["SFTTrainer", "peft", "transformers"]
