"""What the fork server imports once for every world: the slow modules and nothing else."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read at import; tplora sets it, too

import peft
import transformers
from trl import SFTTrainer

__all__ = ["SFTTrainer", "peft", "transformers"]

gc.collect()
gc.freeze()  # no rank looks through them again, nor copies their pages
