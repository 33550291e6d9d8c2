"""A step of tplora at many sizes, and the formulas that its cost should follow.

    bytes a rank gives  =  e T H (4 L + 1)  +  3 e N  +  7 e r H L            P > 1; e = 4

    T tokens   N labels, one fewer a row   H hidden size   L layers   P tp_size

The first term is two sums a layer forward and two backward (the first layer's input has no
gradient), the embedding's sum and the head's; the second gathers three numbers a label, of which
the loss is made; the third is the bucket: A of q, k, v, gate, up and B of o and down.
"""

from collections.abc import Sequence
from typing import Any

from tests.benchmarks.steps.measure import Ranks, Work

CHANGES = {
    "hidden_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 1032,
}
"""Heads and a vocabulary that 2, 3 and 4 divide."""


def bytes_of(work: Work, config: Any) -> int:
    """The formula above."""
    if work.tp_size == 1:
        return 0
    tokens, hidden, layers = work.rows * work.length, config.hidden_size, config.num_hidden_layers
    activations = tokens * hidden * (4 * layers + 1)
    statistics = 3 * (tokens - work.rows)
    return 4 * (activations + statistics + 7 * work.r * hidden * layers)


def measure(work: Work, python: str, *, num_repeats: int) -> dict[str, Any]:
    """Counts and the shortest of some steps."""
    with Ranks("tplora", work, python) as ranks:
        ranks.ask("step")
        counts = ranks.ask("count")[0]
        times = [max(one["seconds"] for one in ranks.ask("step")) for _ in range(num_repeats)]
    return {"tp_size": work.tp_size, "r": work.r, "length": work.length, **counts} | {
        "seconds": min(times)
    }


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """Least squares ``a + b x``, and the largest distance from it, as a part of y."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    start = mean_y - slope * mean_x
    worst = max(abs(start + slope * x - y) / y for x, y in zip(xs, ys, strict=True))
    return start, slope, worst
