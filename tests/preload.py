"""What the fork server imports once for every world: slow modules, and all that a run needs."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; tplora sets it, too

import matplotlib.backends.backend_agg
import peft
import transformers
from trl import SFTTrainer

import tplora.run.finetune

__all__ = ["SFTTrainer", "matplotlib", "peft", "tplora", "transformers"]

# What is imported stays: a rank that collects garbage would look at all of it, and copy its pages.
gc.collect()
gc.freeze()
