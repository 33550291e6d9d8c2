"""What many small factors cost in a step: on DTensors as unmodified trainers do, and on pieces.

python -m tests.benchmarks.step_overhead
"""
