"""A recipe's plan as a person sees it, alone or with what a step will take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tplora.terminal.show import say, show

if TYPE_CHECKING:
    from tplora.plan.axes import Axes
    from tplora.recipe.schema import Recipe

__all__ = ["planned_axes", "show_plan", "show_prediction"]


def show_plan(recipe: Recipe, *, axes: Axes) -> None:
    """Make a recipe's plan and show it."""
    from tplora.plan.report import render_plan
    from tplora.run.preflight import plan_recipe

    plan = plan_recipe(recipe, tp_size=axes.tp_size, progress=say)
    show(render_plan(plan, axes))


def show_prediction(recipe: Recipe, *, axes: Axes, gpu_memory: str | None) -> None:
    """Make a recipe's plan and show it, with what a step will take and say.

    A plan that cannot be run through is shown all the same, with the reason.
    """
    from tplora.errors import PlanError
    from tplora.plan.report import render_plan
    from tplora.plan.size import parse_size
    from tplora.plan.step_report import step_facts
    from tplora.run.fit import find_fit
    from tplora.run.predict import num_micro_batches, predict_step
    from tplora.run.preflight import plan_recipe

    memory = None if gpu_memory is None else parse_size(gpu_memory, where="--gpu-memory")
    plan = plan_recipe(recipe, tp_size=axes.tp_size, progress=say)
    try:
        cost = predict_step(recipe, plan)
        facts = step_facts(plan, axes, cost, num_micro_batches=num_micro_batches(recipe))
        if memory is not None:
            facts += find_fit(recipe, axes, memory, progress=_say_aside).facts()
    except PlanError as error:
        if memory is not None:
            raise
        facts = [("memory per rank", f"not predicted: {error}")]
    show(render_plan(plan, axes, facts))


def _say_aside(message: str) -> None:
    say(message, style="dim", is_error=True)


def planned_axes(recipe: Recipe) -> Axes:
    """Of a plan that is only looked at: as asked, whatever this machine has."""
    from tplora.launch.launcher import count_gpus, default_num_processes
    from tplora.plan.axes import fill_world

    num_gpus = count_gpus() if recipe.parallel.tp_size == "auto" else 0
    return fill_world(default_num_processes(recipe.parallel, num_gpus=num_gpus), recipe.parallel)
