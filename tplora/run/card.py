"""What a run tells its adapter's model card."""

from pathlib import Path

from tplora.recipe.schema import Recipe

__all__ = ["card_facts"]


def card_facts(recipe: Recipe, records: list[dict[str, float]]) -> dict[str, str]:
    """What the model card says of the training."""
    facts = {"rows": f"`{Path(recipe.data.train).name}`", "steps": str(records[-1]["step"])}
    losses = [record["eval_loss"] for record in records if "eval_loss" in record]
    if losses:
        facts["evaluation loss"] = " -> ".join(f"{loss:.4f}" for loss in (losses[0], losses[-1]))
    return facts
