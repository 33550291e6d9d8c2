"""Float64 throughout, whatever a model's code casts to float32 and whatever weights it keeps there.

A norm or a softmax in float32 rounds away what a parity test looks for, and once in a while a value
on the border between two roundings shows as 1e-7 what is 1e-16.
"""

import torch

from tests.models import InDouble
from tplora.adapter.low_rank import LowRankSum

_HAVE_DTYPES = (torch.Tensor, LowRankSum)


class Double(InDouble):
    """``InDouble``, and where float64 meets float32 the latter gives way."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        dtypes = {one.dtype for one in (*args, *kwargs.values()) if isinstance(one, _HAVE_DTYPES)}
        is_copy = func is torch.Tensor.copy_
        if {torch.float32, torch.float64} <= dtypes and not is_copy:
            is_in_place = getattr(func, "__name__", "").endswith("_")
            args = tuple(a if k == 0 and is_in_place else _widen(a) for k, a in enumerate(args))
            kwargs = {name: _widen(value) for name, value in kwargs.items()}
        return super().__torch_function__(func, types, args, kwargs)


def _widen(value):
    is_narrow = isinstance(value, _HAVE_DTYPES) and value.dtype == torch.float32
    return value.to(torch.float64) if is_narrow else value
