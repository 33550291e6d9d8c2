"""``trainable_token_indices``: of which modules some tokens are trained, and which follow them.

A head that is tied to the embedding follows it, as in PEFT, unless it was given other tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from tplora.plan.style import FactorPlan
from tplora.plan.trained import part_problem, plan_part, style_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from peft import LoraConfig

    from tplora.plan.facts import ModelFacts, PartFacts
    from tplora.plan.trained import TrainedPlan

__all__ = ["plan_token_rows", "plan_tokens"]

_KEY = "lora.trainable_token_indices"
_LEAVE_OUT = "leave it out, and model.add_tokens, whose tokens are trained here too"


def plan_tokens(
    facts: ModelFacts, lora: LoraConfig, taken: Collection[str], *, tp_size: int
) -> tuple[list[TrainedPlan], list[str]]:
    """Each module of which tokens are trained, and why others cannot be.

    Args:
        facts: The model.
        lora: The config.
        taken: Modules that are adapted or trained whole.
        tp_size: Ranks of one tensor-parallel group.
    """
    asked = lora.trainable_token_indices
    if not asked:
        return [], []
    targets = dict(asked) if isinstance(asked, dict) else {facts.embedding: asked}
    follows, problems = _follow(facts, targets, is_asked=bool(lora.ensure_weight_tying))
    plans: list[TrainedPlan] = []
    for entry, tokens in targets.items():
        if follows and entry in facts.tied:
            continue
        matched = [part for part in facts.parts if part.name.endswith(str(entry))]
        if not matched:
            problems.append(f"{_KEY}: {entry!r} matches no module; leave it out")
        for part in matched:
            problem = _problem(facts, part, tokens, taken, tp_size)
            if problem is None:
                plans.append(plan_token_rows(part, tuple(tokens), tp_size))
            else:
                problems.append(f"{_KEY}: {part.name} {problem}")
    problems += _named_twice(plan.name for plan in plans)
    if follows:
        tied, more = _tied_plans(facts, plans, taken, tp_size)
        plans, problems = [*plans, *tied], [*problems, *more]
    return plans, problems


def _named_twice(names: Iterable[str]) -> list[str]:
    counts = Counter(names)
    return [
        f"{_KEY}: two entries name {name}; put its tokens into one"
        for name in counts
        if counts[name] > 1
    ]


def _tied_plans(
    facts: ModelFacts, plans: list[TrainedPlan], taken: Collection[str], tp_size: int
) -> tuple[list[TrainedPlan], list[str]]:
    """What uses the embedding's trained rows as well."""
    source = next((plan for plan in plans if plan.name == facts.embedding), None)
    if source is None:
        return [], []
    parts = [facts.part(name) for name in facts.tied]
    found = [(part.name, _problem(facts, part, source.tokens, taken, tp_size)) for part in parts]
    problems = [
        f"{_KEY}: {name}, tied to {source.name}, {problem}" for name, problem in found if problem
    ]
    if problems:
        return [], problems
    tied = [plan_token_rows(part, source.tokens, tp_size, tied_to=source.name) for part in parts]
    return tied, []


def _follow(
    facts: ModelFacts, targets: Mapping[Any, Any], *, is_asked: bool
) -> tuple[bool, list[str]]:
    """Whether what is tied to the embedding takes its trained tokens."""
    if not facts.is_tied:
        return False, []
    own = [entry for entry in targets if _is_of_pair(facts, str(entry))]
    differs = len(own) > 1 and any(targets[entry] != targets[own[0]] for entry in own[1:])
    if differs and is_asked:
        return False, [
            f"lora.ensure_weight_tying: {', '.join(map(str, own))} are tied and are given other "
            f"tokens each in {_KEY}; give them the same"
        ]
    is_led = any(facts.embedding and facts.embedding.endswith(str(entry)) for entry in targets)
    if is_asked and own and not is_led:
        return False, [
            f"lora.ensure_weight_tying: {_KEY} names {own[0]} without the embedding that it is "
            "tied to; name the embedding instead"
        ]
    return is_led and not differs, []


def _is_of_pair(facts: ModelFacts, entry: str) -> bool:
    is_embedding = facts.embedding is not None and facts.embedding.endswith(entry)
    return is_embedding or any(n.endswith(entry) or entry in n.split(".") for n in facts.tied)


def _problem(
    facts: ModelFacts, part: PartFacts, tokens: Any, taken: Collection[str], tp_size: int
) -> str | None:
    """Why tokens of a module cannot be trained exactly, or None."""
    if part.name in taken:
        return (
            "is adapted or trained whole as well, and model.add_tokens trains new tokens here too; "
            "choose one of them"
        )
    if part.kind not in ("linear", "embedding"):
        return f"is a {part.type_name}, which has no tokens; leave it out"
    if part.kind == "linear" and "bias" in dict(part.parameters):
        return f"has a bias, which peft leaves out where tokens are trained; {_LEAVE_OUT}"
    problem = part_problem(facts, part) if tp_size > 1 else None
    if problem is not None:
        return f"{problem}; {_LEAVE_OUT}"
    if part.kind == "linear" and style_of(part, tp_size).weight_shard_dim == 1:
        return f"is cut on its input ({part.style}), not on its tokens; {_LEAVE_OUT}"
    return _tokens_problem(tokens, dict(part.parameters)["weight"][0])


def _tokens_problem(tokens: Any, num_tokens: int) -> str | None:
    wrong = [
        token for token in tokens if not isinstance(token, int) or token not in range(num_tokens)
    ]
    if wrong:
        return f"has no token {wrong[0]!r}, only 0 to {num_tokens - 1}; leave it out"
    twice = sorted({token for token in tokens if list(tokens).count(token) > 1})
    return f"is given token {twice[0]} twice; name each once" if twice else None


def plan_token_rows(
    part: PartFacts, tokens: tuple[int, ...], tp_size: int, *, tied_to: str | None = None
) -> TrainedPlan:
    """The rows are whole, and each is used where the token's row of W is; or cut on hidden."""
    dim = style_of(part, tp_size).weight_shard_dim
    is_hidden_cut = part.kind == "embedding" and dim == 1
    rows = FactorPlan(
        shape=(len(tokens), dict(part.parameters)["weight"][1]),
        shard_dim=1 if is_hidden_cut else None,
        is_grad_partial=dim == 0,
    )
    factors = () if tied_to else (("rows", rows),)
    return plan_part(part, "tokens", factors, tp_size, tokens=tokens, tied_to=tied_to)
