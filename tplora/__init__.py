"""LoRA under tensor parallelism: a run at tp_size N is the run at tp_size 1."""

__version__ = "0.1.0"
