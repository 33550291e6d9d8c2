"""What a device multiplies at the most: dense products in 16 bits, from its maker's data sheet."""

from __future__ import annotations

__all__ = ["PEAK_FLOPS", "peak_flops"]

_HALF = "half of what is given with sparsity"
PEAK_FLOPS: tuple[tuple[str, float, str], ...] = (
    ("B200", 2250e12, f"NVIDIA Blackwell data sheet, HGX B200, {_HALF} (4.5 PFLOPS)"),
    ("H200 NVL", 836e12, f"NVIDIA H200 data sheet, NVL, {_HALF} (1,671 TFLOPS)"),
    ("H200", 989e12, f"NVIDIA H200 data sheet, SXM, {_HALF} (1,979 TFLOPS)"),
    ("H100 NVL", 835e12, f"NVIDIA H100 data sheet, NVL, {_HALF} (1,671 TFLOPS)"),
    ("H100 PCIe", 756e12, f"NVIDIA H100 data sheet, PCIe, {_HALF} (1,513 TFLOPS)"),
    ("H100", 989e12, f"NVIDIA H100 data sheet, SXM, {_HALF} (1,979 TFLOPS)"),
    ("A100", 312e12, "NVIDIA A100 data sheet 1758950, given without sparsity"),
    ("A40", 149.7e12, "NVIDIA A40 data sheet, given without sparsity"),
    ("L40S", 362e12, "NVIDIA L40S data sheet, given without sparsity (362.05 TFLOPS)"),
    ("L40", 181e12, "NVIDIA L40 data sheet, given without sparsity (181.05 TFLOPS)"),
    ("L4", 121e12, f"NVIDIA L4 data sheet, {_HALF} (242 TFLOPS)"),
)
"""A part of torch's name for a device, operations a second in bfloat16 with sums in float32, and
where that stands. The first whose parts occur in the name is meant. What no data sheet was found
for is left out: a utilisation of a guess is none."""


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
