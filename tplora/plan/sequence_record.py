"""A decoder run through without storage: which of its modules need whole sequences.

A unit is the outermost module that holds a matrix and that a layer's own code calls. What the code
around units does to tokens is held to numbers in ``sequence_proof.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tplora.plan.style import STYLES
from tplora.plan.values import AsIfAllHeld
from tplora.upstream.decoder import holds_layers, is_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

__all__ = ["ROWS", "Record", "UnitCall", "outputs_of", "record_decoder"]

ROWS = 2
"""Rows of the batch that is run through."""


@dataclass(slots=True, kw_only=True)
class UnitCall:
    """One call of a unit."""

    output: Any
    row: str | None
    """The row-parallel layer whose output was returned as it was."""


@dataclass(slots=True, kw_only=True)
class Record:
    """What ran, by the modules' names in the model."""

    entry: str = ""
    """The layer that ran first; nothing if none did."""
    units: dict[str, list[UnitCall]] = field(default_factory=dict)
    on_tokens: dict[str, nn.Module] = field(default_factory=dict)
    """Modules that ran outside units after the entry, but for layers and what holds them."""


def outputs_of(output: Any) -> list[tuple[int | None, Any]]:
    """What a module returned, one by one with its place; None for all of it."""
    if isinstance(output, (tuple, list)):
        return list(enumerate(output))
    return [(None, output)]


def record_decoder(name: str, decoder: nn.Module, styles: Mapping[str, str], length: int) -> Record:
    """Run ``decoder`` on the meta device with ``[ROWS, length]`` tokens.

    Args:
        name: Its name in the model.
        decoder: Uncut.
        styles: Of modules, by their names in the model.
        length: Tokens of a row.
    """
    recorder = _Recorder(name, decoder, styles)
    ids = torch.zeros((ROWS, length), dtype=torch.long, device="meta")
    try:
        with AsIfAllHeld(), recorder.ops:  # type: ignore[no-untyped-call]
            decoder(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    finally:
        recorder.remove()
    return recorder.record


class _NumOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, counts torch's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class _Recorder:
    """Hooks on every module of a decoder."""

    def __init__(self, name: str, decoder: nn.Module, styles: Mapping[str, str]) -> None:
        self.record, self.ops = Record(), _NumOps()
        self._unit: str | None = None
        self._row: tuple[str, Any, int] | None = None
        self._handles: list[RemovableHandle] = []
        prefix = f"{name}." if name else ""
        for path, module in decoder.named_modules():
            if path:
                full = prefix + path
                self._watch(full, module, is_row=_is_row(module, styles.get(full)))

    def _watch(self, name: str, module: nn.Module, *, is_row: bool) -> None:
        is_unit = not holds_layers(module) and any(p.ndim > 1 for p in module.parameters())

        def enter(*_: Any) -> None:
            if self._unit is None and is_unit:
                self._unit, self._row = name, None
            elif self._unit is None:
                self._pass(name, module)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            if is_row and self._unit not in (None, name):
                self._row = name, output, self.ops.count
            if self._unit == name:
                calls = self.record.units.setdefault(name, [])
                calls.append(UnitCall(output=output, row=self._row_of(output)))
                self._unit = None

        self._handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ]

    def _pass(self, name: str, module: nn.Module) -> None:
        """Outside units."""
        if is_layer(module):
            self.record.entry = self.record.entry or name
        elif self.record.entry and not holds_layers(module):
            self.record.on_tokens[name] = module

    def _row_of(self, output: Any) -> str | None:
        """Which row-parallel layer gave the first of ``output``, with nothing done after it."""
        if self._row is None:
            return None
        name, found, count = self._row
        is_last = count == self.ops.count and outputs_of(output)[0][1] is found
        return name if is_last else None

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_row(module: nn.Module, style: str | None) -> bool:
    found = STYLES["linear"].get(style)
    is_plain = type(module).forward is nn.Linear.forward
    return is_plain and found is not None and found.weight_shard_dim == 1
