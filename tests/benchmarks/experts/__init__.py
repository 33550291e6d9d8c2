"""What adapting a stack of experts costs: tplora's ParamWrapper against plain PEFT's.

python -m tests.benchmarks.experts
"""
