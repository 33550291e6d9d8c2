"""One run of a decoder on numbers, its units stood in for: of all tokens, or of one rank's."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only

from tplora.plan.sequence_record import ROWS, Record, outputs_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MixedError", "NumbersRun", "is_on_tokens", "numbers_like", "token_outputs"]

_RTOL = 1e-4
"""Norms compute in float32; what mixes tokens is off by as much as there is."""


class MixedError(Exception):
    """Something is not a rank's tokens where it has to be."""


class NumbersRun:
    """One run on numbers: of all tokens, which is noted, or of a rank's, which is compared."""

    def __init__(
        self, record: Record, length: int, tokens: slice | None, truth: NumbersRun | None = None
    ) -> None:
        self._record, self._length = record, length
        self._tokens, self._truth = tokens, truth
        self.given: dict[str, list[tuple[Any, Any]]] = {}
        """Each unit's arguments, call by call, of all tokens."""
        self.num_calls: Counter[str] = Counter()
        self.inputs: dict[str, tuple[int | str, ...]] = {}
        self._has_entered = False
        self._draw = torch.Generator().manual_seed(1)

    @contextlib.contextmanager
    def entering(self, model: nn.Module) -> Iterator[None]:
        """While open, the sequence is cut before the first layer, if it is."""

        def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._has_entered or self._tokens is None:
                return None
            self._has_entered = True
            if args:
                return (args[0][:, self._tokens].clone(), *args[1:]), kwargs
            cut = kwargs["hidden_states"][:, self._tokens].clone()
            return args, kwargs | {"hidden_states": cut}

        layer = model.get_submodule(self._record.entry)
        handle = layer.register_forward_pre_hook(enter, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        """Stand in for a unit."""
        call, recorded = self.num_calls[name], self._record.units[name]
        self.num_calls[name] += 1
        if call >= len(recorded):
            raise MixedError(f"{name} is called another number of times")
        whole = tree_map_only(
            torch.Tensor, lambda one: numbers_like(one, self._draw), recorded[call].output
        )
        if self._truth is None or self._tokens is None:
            given = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs))
            self.given.setdefault(name, []).append(given)
            return whole
        truth = self._truth.given[name][call]
        inputs = tuple(_tokens_among(name, (args, kwargs), truth, self._tokens))
        if self.inputs.setdefault(name, inputs) != inputs:
            raise MixedError(f"{name} is given tokens in one call and not in another")
        return _cut(whole, self._tokens, self._length) if inputs else whole


def _tokens_among(
    name: str, given: tuple[Any, Any], truth: tuple[Any, Any], tokens: slice
) -> Iterator[int | str]:
    """Which arguments are this rank's tokens; the others have to be as with all tokens."""
    found: dict[int | str, Any] = dict(enumerate(given[0])) | given[1]
    wanted: dict[int | str, Any] = dict(enumerate(truth[0])) | truth[1]
    for key, value in found.items():
        what = f"argument {key} of {name}"
        if is_on_tokens(value, wanted[key], tokens, what):
            yield key


def is_on_tokens(found: Any, wanted: Any, tokens: slice, what: str) -> bool:
    """Whether ``found`` is ``tokens`` of ``wanted`` and not all of it."""
    if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if _is_close(found, wanted):
            return False
        if wanted.ndim > 2 and _is_close(found, wanted[:, tokens]):
            return True
        raise MixedError(f"{what} is not what it is for all tokens, nor some tokens of it")
    (leaves, form), (others, other_form) = tree_flatten(found), tree_flatten(wanted)
    if form != other_form:
        raise MixedError(f"{what} has another form than for all tokens")
    for one, other in zip(leaves, others, strict=True):
        is_pair = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        if is_pair and not _is_close(one, other):
            raise MixedError(f"{what} has a tensor in it that is not what it is for all tokens")
    return False


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found, wanted, rtol=_RTOL, atol=_RTOL, equal_nan=True)


def token_outputs(output: Any, length: int) -> tuple[tuple[int | None, tuple[int, ...]], ...]:
    """Which outputs of a unit are tokens, and their shape behind ``[B, T]``."""
    return tuple(
        (place, tuple(one.shape[2:]))
        for place, one in outputs_of(output)
        if isinstance(one, torch.Tensor) and _is_tokens(one, length)
    )


def _is_tokens(tensor: torch.Tensor, length: int) -> bool:
    is_long_enough = tensor.ndim > 2 and tensor.is_floating_point()
    return is_long_enough and tuple(tensor.shape[:2]) == (ROWS, length)


def _cut(whole: Any, tokens: slice, length: int) -> Any:
    """What a unit gives of all tokens, cut to some."""
    places = {place for place, _ in token_outputs(whole, length)}
    if None in places:
        return whole[:, tokens].clone()
    if not places:
        return whole
    cut = [one[:, tokens].clone() if k in places else one for k, one in enumerate(whole)]
    return cut if isinstance(whole, list) else tuple(cut)


def numbers_like(like: torch.Tensor, draw: torch.Generator) -> Any:
    """Random numbers in the shape of ``like``; of a vector positive ones, of indices zero."""
    if like.is_floating_point():
        made: torch.Tensor = torch.rand(like.shape, generator=draw).add(0.5).to(like.dtype)
        sign = torch.randint(2, like.shape, generator=draw).mul(2).sub(1)
        made = made if like.ndim < 2 else made * sign
    else:
        made = torch.zeros(like.shape, dtype=like.dtype)
    is_parameter = isinstance(like, nn.Parameter)
    return nn.Parameter(made, requires_grad=False) if is_parameter else made
