"""What ranks say to each other while a function runs, counted by kind."""

from collections import Counter
from collections.abc import Callable

from tplora.rehearsal.recorded import Recorded, kind_of

__all__ = ["Recorded", "count_collectives", "kind_of"]


def count_collectives(fn: Callable[[], object]) -> dict[str, int]:
    """Calls of each kind while ``fn`` ran."""
    with Recorded() as recorded:
        fn()
    return dict(Counter(kind for kind, _ in recorded.calls))
