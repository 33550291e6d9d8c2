"""What ``[parallel] sequence_parallel`` cannot be asked for together with."""

from collections.abc import Iterator, Mapping
from typing import Any

from tplora.recipe.wording import Places, say_problem

__all__ = ["find_sequence_problems"]


def find_sequence_problems(
    parallel: Mapping[str, Any], train: Mapping[str, Any], places: Places
) -> Iterator[str]:
    """Keys that would have no effect on a cut sequence, or are not held to one process on one."""
    if parallel.get("sequence_parallel") is not True:
        return
    leave = "leave one of them out"
    if parallel.get("overlap_communication") is True:
        message = f"sums that sequence_parallel scatters are not overlapped; {leave}"
        yield say_problem(["parallel", "overlap_communication"], message, places=places, value=True)
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        given = train.get(name)
        if isinstance(given, Mapping) and given.get("keep_reduced_outputs") is True:
            message = f"sums that parallel.sequence_parallel scatters are not kept; {leave}"
            path = ["train", name, "keep_reduced_outputs"]
            yield say_problem(path, message, places=places, value=True)
    if train.get("bf16") is True:
        message = (
            "autocast with parallel.sequence_parallel has not been held to one process; leave one "
            'of them out, or load the base in model.dtype = "bfloat16"'
        )
        yield say_problem(["train", "bf16"], message, places=places, value=True)
