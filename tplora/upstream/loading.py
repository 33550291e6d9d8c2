"""Private names of transformers and torch: how a base is loaded, and what mending it takes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tplora.upstream.dtensor import local_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedModel

__all__ = [
    "Conversions",
    "fused_weights_read_by_piece",
    "has_interleaved_experts",
    "label_as_halves",
    "names_joined_in_files",
    "replace_gaussian_topk",
]


@contextlib.contextmanager
def fused_weights_read_by_piece(sizes: Callable[[int, int], list[int]]) -> Iterator[None]:
    """While open, of a fused weight each rank reads its piece of every weight it falls into.

    transformers 5.24 (core_model_loading.py) reads of the fused weight what belongs to the first of
    them, a contiguous piece (``DtensorShardOperation``). Then ``Chunk`` takes the parts of that
    piece for the weights, and ``Split``, which knows full sizes only, fails.

    Args:
        sizes: From the full rows of the fused weight and of the first weight it falls into, the
            full rows of each.
    """
    from transformers import core_model_loading as loading

    before, split_before = loading.DtensorShardOperation, loading.Split.convert

    class ReadByPiece(before):  # type: ignore[misc, valid-type]
        def __init__(self, param: DTensor) -> None:
            super().__init__(param)
            self.full_shape = tuple(param.shape)

        def shard_tensor(
            self, source: Any, tensor_idx: Any = None, device: Any = None, dtype: Any = None
        ) -> Any:
            is_loaded = isinstance(source, torch.Tensor)
            shape = tuple(source.shape if is_loaded else source.get_shape())
            is_fused = len(shape) == len(self.full_shape) and shape[0] != self.full_shape[0]
            if not is_fused:
                return super().shard_tensor(source, tensor_idx, device, dtype)
            mesh, pieces, start = self.device_mesh, [], 0
            for size in sizes(shape[0], self.full_shape[0]):
                pieces += self._compute_contiguous_slice(
                    [(start, start + size)], mesh.get_local_rank(), mesh.size()
                )
                start += size
            rows = [source[begin:end] for begin, end in pieces]
            return torch.cat(rows).to(device=device, dtype=dtype)

    def split(op: Any, input_dict: Any, *, model: Any, **settings: Any) -> Any:
        return split_before(op, input_dict, model=_LocalSizes(model), **settings)

    loading.DtensorShardOperation, loading.Split.convert = ReadByPiece, split
    try:
        yield
    finally:
        loading.DtensorShardOperation, loading.Split.convert = before, split_before


class _LocalSizes:
    """A model whose parameters are as large as this rank's shards."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def get_parameter(self, name: str) -> torch.Tensor:
        return local_shard(self._model.get_parameter(name))


def _conversions(model: PreTrainedModel) -> list[Any]:
    """``PreTrainedModel._weight_conversions`` (transformers 5.24): those that this load used.

    Not those that only put a quantised weight together; they have no way back.
    """
    return [
        one
        for one in getattr(model, "_weight_conversions", None) or []
        if not any(hasattr(op, "hf_quantizer") for op in getattr(one, "operations", ()))
    ]


def names_joined_in_files(model: PreTrainedModel, names: list[str]) -> list[list[str]]:
    """Parameters that come from one tensor of the checkpoint, or one set of them, together.

    ``revert_weight_conversion`` collects them by these names (transformers 5.24).
    """
    from transformers.core_model_loading import WeightConverter, apply_converters

    reverse = [one.reverse_transform() for one in _conversions(model)[::-1]]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    joined: dict[str, list[str]] = {}
    for name in names:
        joined.setdefault(str(apply_converters(name, converters)[0]), []).append(name)
    return list(joined.values())


def has_interleaved_experts(model: PreTrainedModel) -> bool:
    """Whether gate and up rows alternated in the checkpoint and were sorted after they were cut.

    ``core_model_loading.Interleave`` (transformers 5.24).
    """
    from transformers.core_model_loading import Interleave

    return any(
        isinstance(op, Interleave)
        for conversion in _conversions(model)
        for op in getattr(conversion, "operations", ())
    )


def label_as_halves(module: nn.Module, name: str, dim: int) -> None:
    """Say of a parameter that each rank holds its piece of the first half, then of the second.

    The storage stays. ``_StridedShard`` (torch 2.11 to 2.14) is how DTensor says so.
    """
    parameter = module.get_parameter(name)
    assert isinstance(parameter, DTensor)
    assert parameter.placements == (Shard(dim),)
    relabelled = DTensor.from_local(
        local_shard(parameter),
        parameter.device_mesh,
        [_StridedShard(dim, split_factor=2)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    setattr(module, name, nn.Parameter(relabelled, requires_grad=parameter.requires_grad))


def replace_gaussian_topk(
    module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Make ``function`` the sparsity of one gemma3n MLP.

    ``Gemma3nTextMLP._gaussian_topk`` (transformers 5.24, models/gemma3n/modeling_gemma3n.py).
    """
    own: Any = module
    assert callable(own._gaussian_topk)
    own._gaussian_topk = function


class Conversions:
    """What was done to a checkpoint's weights while a model loaded, and how it is taken back.

    ``PreTrainedModel._weight_conversions`` (transformers 5.24): those that this load used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.core_model_loading import WeightConverter

        self._model = model
        converters = [one for one in _conversions(model) if isinstance(one, WeightConverter)]
        self._operations = [(one.reverse_transform(), one.operations) for one in converters]

    def _operations_of(self, name: str) -> list[Any]:
        return [
            operation
            for reverse, operations in self._operations
            if reverse.rename_source_key(name)[1] is not None
            for operation in operations
        ]

    def lose(self, name: str) -> bool:
        """Whether parameter ``name`` was made in a way that cannot be taken back bit for bit.

        Rows left out (``Inkling2UnpadVocab``) and dequantised weights (transformers 5.24).
        """
        return any(
            word in type(operation).__name__
            for operation in self._operations_of(name)
            for word in ("Unpad", "Dequantize")
        )

    def keep_rows_apart(self, name: str, dim: int) -> bool:
        """Whether the first rows of ``dim`` alone can be taken back as well."""
        return all(
            type(operation).__name__ == "MergeModulelist"
            or (
                type(operation).__name__ in ("Chunk", "Concatenate", "Interleave", "Split")
                and operation.dim >= 0
                and operation.dim != dim
            )
            for operation in self._operations_of(name)
        )

    def reverted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Full tensors under the names and in the form in which the model's checkpoint has them.

        ``revert_weight_conversion`` (transformers 5.24, core_model_loading.py), as
        ``save_pretrained`` uses it. Tensors that fuse into one have to come together.
        """
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = self._model
        kept, model._weight_conversions = model._weight_conversions, _conversions(model)
        try:
            reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
        finally:
            model._weight_conversions = kept
        return reverted
