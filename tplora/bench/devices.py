"""What a device multiplies at the most: dense products in 16 bits, from its maker's data sheet."""

from __future__ import annotations

__all__ = ["PEAK_FLOPS", "peak_flops"]

PEAK_FLOPS: tuple[tuple[str, float, str], ...] = (
    ("B200", 2250e12, "NVIDIA HGX B200 data sheet, half of what is given with sparsity"),
    ("H200", 989e12, "NVIDIA H200 data sheet, half of what is given with sparsity"),
    ("H100 PCIe", 756e12, "NVIDIA H100 data sheet, half of what is given with sparsity"),
    ("H100", 989e12, "NVIDIA H100 data sheet (SXM), half of what is given with sparsity"),
    ("A100", 312e12, "NVIDIA A100 data sheet"),
    ("L40S", 362e12, "NVIDIA L40S data sheet"),
    ("A10", 125e12, "NVIDIA A10 data sheet"),
    ("L4", 121e12, "NVIDIA L4 data sheet, half of what is given with sparsity"),
)
"""A part of torch's name for a device, operations a second, and where that stands. The first whose
parts occur in the name is meant."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Operations a second in ``dtype`` by the table; None for what is not in it.

    Args:
        device_name: As ``torch.cuda.get_device_name`` says it.
        dtype: What the base is held in; only 16-bit products are in the table.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    words = device_name.replace("-", " ").split()
    return next((peak for name, peak, _ in PEAK_FLOPS if _occurs(name, words)), None)


def _occurs(name: str, words: list[str]) -> bool:
    return all(part in words for part in name.split())
