"""What a run tells its adapter's model card."""

from pathlib import Path

from tplora.recipe.methods import DEFAULT_METHOD
from tplora.recipe.schema import Recipe

__all__ = ["card_facts", "first_and_last"]


def card_facts(
    recipe: Recipe, records: list[dict[str, float]], best_step: int | None = None
) -> dict[str, str]:
    """What the model card says of the training; ``best_step`` is saved, or the last one."""
    last = records[-1]["step"]
    facts = {"rows": f"`{Path(recipe.data.train).name}`", "steps": str(best_step or last)}
    if best_step is not None:
        facts["chosen among"] = f"the checkpoints of {last} steps"
    if recipe.method != DEFAULT_METHOD:
        facts = {"method": recipe.method, **facts}
    losses = first_and_last(records, "eval_loss", best_step)
    if losses:
        facts["evaluation loss"] = " -> ".join(f"{loss:.4f}" for loss in losses)
    return facts


def first_and_last(
    records: list[dict[str, float]], name: str, best_step: int | None = None
) -> tuple[float, float] | None:
    """A number of the first evaluation, and of that of what was saved; None where there is none."""
    found = {r["step"]: r[name] for r in records if r.get(name) is not None}
    if not found:
        return None
    values = list(found.values())
    return values[0], found.get(best_step or -1, values[-1])
