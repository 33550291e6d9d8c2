"""Have PEFT train whole modules, tokens and biases by the plan, on this rank's pieces.

PEFT's wrappers stay: names, files, switching and disabling are theirs. What they train becomes
factors, so that gradients, optimizers, files and checkpoints need no other way.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper

from tplora.adapter.factor import Factor, Factors
from tplora.adapter.local_module import LocalModule
from tplora.adapter.tokens import TploraTokens
from tplora.errors import ShardError
from tplora.upstream import building_token_layers, copying_shards, local_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from tplora.collectives.shared_input import SharedInput
    from tplora.plan.layer import LayerPlan
    from tplora.plan.trained import TrainedPlan

__all__ = ["building_trained", "conflicts", "cut_trained"]

_WRAPPERS = {"module": ModulesToSaveWrapper, "tokens": TrainableTokensWrapper}


def conflicts(
    base: PreTrainedModel, layers: Iterable[LayerPlan], trained: Iterable[TrainedPlan]
) -> list[str]:
    """Why an adapter cannot be put beside those that a model has: one module, two ways."""
    wrappers = tuple(_WRAPPERS.values())
    instead = "leave it out, or attach the adapter to a model of its own"
    problems = [
        f"lora.target_modules: {layer.module_name} is trained itself by another adapter; {instead}"
        for layer in layers
        if isinstance(base.get_submodule(layer.module_name), wrappers)
    ]
    for plan in trained:
        module = base.get_submodule(plan.name)
        is_other = isinstance(module, wrappers) and not isinstance(module, _WRAPPERS[plan.what])
        if is_other or isinstance(module, BaseTunerLayer):
            problems.append(
                f"{plan.name} is to be trained, and is adapted or trained otherwise by another "
                f"adapter; {instead}"
            )
        elif plan.what == "tokens" and isinstance(module, wrappers):
            is_tied = module.token_adapter.tied_adapter is not None
            if is_tied != (plan.tied_to is not None):
                problems.append(
                    f"lora.trainable_token_indices: {plan.name} follows the embedding's tokens for "
                    f"one adapter and is given its own by another; {instead}"
                )
    return problems


@contextlib.contextmanager
def building_trained(
    base: PreTrainedModel,
    plans: Iterable[TrainedPlan],
    mesh: DeviceMesh | None,
    shared_input: SharedInput,
) -> Iterator[None]:
    """While open, PEFT's wrappers hold our layer of tokens, and copies of this rank's pieces."""
    by_module = {id(base.get_submodule(plan.name)): plan for plan in plans if plan.what == "tokens"}

    def build(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        plan = by_module[id(module)]
        return TploraTokens(
            module, *args, plan=plan, mesh=mesh, shared_input=shared_input, **kwargs
        )

    with building_token_layers(build), copying_shards():
        yield


def cut_trained(
    base: PreTrainedModel,
    adapter_name: str,
    plans: Iterable[TrainedPlan],
    mesh: DeviceMesh | None,
    shared_input: SharedInput,
) -> Iterator[Factor]:
    """Make factors of what PEFT trains beside its own; yield them.

    Communication: two all-reduces of the bytes of each tensor that begins as a copy.

    Raises:
        ShardError: If PEFT wrapped other modules than the plan says, or ranks hold different
            copies of what every rank holds whole.
    """
    plans = tuple(plans)
    _check_wrapped(base, adapter_name, plans)
    sources: dict[str, Factors] = {}
    for plan in plans:
        if plan.what == "tokens":
            layer = base.get_submodule(plan.name).token_adapter
            assert isinstance(layer, TploraTokens)
            prefix = f"base_model.model.{plan.name}"
            yield from layer.make_factors(adapter_name, prefix, plan).values()
            continue
        name, module = _trained_module(base, adapter_name, plan)
        if plan.tied_to is None:
            factors = _own_factors(name, module, plan, mesh)
            _check_same(factors, mesh)
            yield from factors.values()
        else:
            factors = sources[plan.tied_to]
            factors["weight"].share_with(module, "weight", f"{name}.weight")
        sources[plan.name] = factors
        if mesh is not None:
            LocalModule(module, plan, factors, mesh, shared_input)


def _trained_module(
    base: PreTrainedModel, adapter_name: str, plan: TrainedPlan
) -> tuple[str, nn.Module]:
    """What is trained of a module: PEFT's copy of it, or the base's own with a trained bias."""
    name, module = plan.name, base.get_submodule(plan.name)
    if plan.what == "module":
        name = f"{name}.modules_to_save.{adapter_name}"
        module = module.modules_to_save[adapter_name]
        vars(module).pop("forward", None)  # a style's, which would run the original
    elif hasattr(module, "base_layer"):
        name, module = f"{name}.base_layer", module.base_layer
    return f"base_model.model.{name}", module


def _own_factors(
    name: str, module: nn.Module, plan: TrainedPlan, mesh: DeviceMesh | None
) -> Factors:
    factors = {}
    for path, factor_plan in plan.factors:
        inside, _, leaf = path.rpartition(".")
        owner = module.get_submodule(inside), leaf
        factors[path] = Factor(f"{name}.{path}", owner, factor_plan, mesh, is_cut=True)
    return factors


def _check_same(factors: Factors, mesh: DeviceMesh | None) -> None:
    """A whole tensor that a checkpoint lacks is drawn by each rank for itself."""
    if mesh is None:
        return
    for factor in factors.values():
        if factor.plan.shard_dim is not None:
            continue
        both = local_shard(factor.parameter).detach()
        both = torch.stack([both, -both])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
        if not torch.equal(both[0], -both[1]):
            raise ShardError(
                f"{factor.name}: differs between the ranks, where it has to be the same; it was "
                "not in the checkpoint, so each rank drew its own: call transformers.set_seed with "
                "one seed on every rank before loading, or load a checkpoint that has it"
            )


def _check_wrapped(
    base: PreTrainedModel, adapter_name: str, plans: tuple[TrainedPlan, ...]
) -> None:
    """Whatever a file will hold is in the plan, and nothing else is."""
    found = {
        name
        for name, module in base.named_modules()
        if isinstance(module, ModulesToSaveWrapper | TrainableTokensWrapper)
        and adapter_name in module._adapters
    }
    planned = {plan.name for plan in plans if plan.what != "bias"}
    wrong = sorted(found ^ planned)
    if wrong:
        raise ShardError(
            f"{wrong[0]} and {len(wrong) - 1} more: peft trains other modules than were planned; "
            "attach to a model that was planned with the same config"
        )
