"""The saved adapter in plain transformers and PEFT, one process, against the trained model.

What is loaded here knows nothing of tplora's layers: if it says what the trained model said, the
files are right, whatever tp_size they were trained with. A quantised base is quantised again, and
multiplies as it did in training: out of it bitsandbytes rounds what it multiplies by further.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from torch import nn
from transformers import BitsAndBytesConfig

from tplora.artifact.adapter_dir import read_adapter
from tplora.artifact.adapter_fit import check_fits_base
from tplora.artifact.plain_folder import plain_folder
from tplora.artifact.probe import Probe, choose_probe_rows, logits_at, read_probe, record_probe
from tplora.base.quantized_product import hold_exact
from tplora.errors import ArtifactError
from tplora.files import write_text_aside
from tplora.upstream import auto_class_of
from tplora.upstream.quantization import full_linear_shape, is_quantized_linear

__all__ = [
    "Probe",
    "VerifyReport",
    "choose_probe_rows",
    "has_passed",
    "record_probe",
    "relative_tolerance",
    "verify_adapter",
    "verify_merged",
    "write_record",
]

RECORD = "verify.json"
"""What was found, beside what it was found of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """How far the reloaded adapter is from the model that was trained."""

    max_abs_diff: float
    """Between the reloaded model's logits and the recorded ones."""
    max_abs_logit: float
    """Of the recorded logits: the scale that the difference is seen on."""
    tolerance: float
    """Of the difference, in logits."""
    max_effect: float
    """How far the adapter moves the logits of the bare base."""
    num_positions: int
    """Places in the text that were compared, each over the whole vocabulary."""
    top1_agreement: float
    """Fraction of the places where both would say the same token next."""
    kl_divergence: float
    """Mean over the places, in nats: of what was found from what was recorded."""

    @property
    def passed(self) -> bool:
        """Whether the logits agree and the adapter does anything at all."""
        return self.max_abs_diff <= self.tolerance and self.max_effect > 0

    @property
    def is_telling(self) -> bool:
        """Whether the bare base would have failed; if not, a pass says little of the factors."""
        return self.max_effect > 2 * self.tolerance


def relative_tolerance(dtype: torch.dtype) -> float:
    """Allowed difference of two runs of the same numbers, as a fraction of the largest logit."""
    # Measured on SmolLM2-135M, four texts, tp_size 3 against one process: float32 1.7e-6, bfloat16
    # 0.018, where one process itself is 0.016 from its own float32. The factors of 3 and more are
    # for deeper models. A lost or swapped factor has to be told by max_effect in bfloat16.
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 0.05)


def verify_adapter(
    adapter_folder: Path,
    base: str,
    probe_path: Path,
    *,
    dtype: torch.dtype,
    quantization: BitsAndBytesConfig | None = None,
    tolerance: float | Literal["by dtype"] = "by dtype",
    device: str = "cpu",
) -> VerifyReport:
    """Load base and adapter without tplora and compare their logits with the recorded ones.

    Not collective, also inside torchrun: nothing here asks for a group or for sharded weights.

    Args:
        adapter_folder: What was saved.
        base: Folder or hub id, as ``from_pretrained`` takes it.
        probe_path: What the trained model said.
        dtype: Of the base, as it was trained on.
        quantization: How the base was quantised on its way; one that is quantised says so itself.
        tolerance: Fraction of the largest recorded logit.
        device: Where to compute.

    Raises:
        ArtifactError: If adapter or probe is damaged, or they belong to another base.
    """
    probe = read_probe(probe_path)
    adapter = read_adapter(adapter_folder)
    given: dict[str, Any] = {} if quantization is None else {"quantization_config": quantization}
    if given:
        given["device_map"] = {"": device}  # quantised on the way there
    model = auto_class_of(base).from_pretrained(base, dtype=dtype, **given).to(device)
    hold_exact(model, None)
    if adapter.num_tokens > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(adapter.num_tokens)
    check_fits_base(adapter, _weight_shapes(model))
    bare = logits_at(model, probe.rows, probe.positions)
    if bare.shape != probe.logits.shape:
        raise ArtifactError(
            f"{probe_path}: holds logits {list(probe.logits.shape)}, {base} gives "
            f"{list(bare.shape)}; name the base that was trained on"
        )
    with plain_folder(adapter) as folder:
        adapted = PeftModel.from_pretrained(model, str(folder), torch_device=device)
    found = logits_at(adapted, probe.rows, probe.positions)
    narrowest = min((dtype, *adapter.dtypes), key=lambda one: torch.finfo(one).bits)
    relative = relative_tolerance(narrowest) if tolerance == "by dtype" else tolerance
    return _report(probe, found, bare, relative)


def verify_merged(
    merged_folder: Path,
    base: str,
    probe_path: Path,
    *,
    dtype: torch.dtype,
    tolerance: float | Literal["by dtype"] = "by dtype",
    device: str = "cpu",
) -> VerifyReport:
    """Load a merged model with transformers alone and compare its logits with the recorded ones.

    Args:
        merged_folder: What ``tplora export --merged`` wrote.
        base: Folder or hub id of the base, which the adapter's effect is seen against.
        probe_path: What the trained model said.
        dtype: Of the base, as it was trained on; the merged model has its own.
        tolerance: Fraction of the largest recorded logit.
        device: Where to compute.

    Raises:
        ArtifactError: If the probe is damaged, or the folder holds another model.
    """
    probe = read_probe(probe_path)
    said = []
    held = dtype
    for path, asked in ((str(merged_folder), "auto"), (base, dtype)):
        model = auto_class_of(path).from_pretrained(path, dtype=asked).to(device)
        held = min(held, model.dtype, key=lambda one: torch.finfo(one).bits)
        logits = logits_at(model, probe.rows, probe.positions)
        said.append(logits[..., : probe.logits.shape[-1]])  # tokens may have been added
    if said[0].shape != probe.logits.shape:
        raise ArtifactError(
            f"{probe_path}: holds logits {list(probe.logits.shape)}, {merged_folder} gives "
            f"{list(said[0].shape)}; name the model that was merged from this run"
        )
    width = said[1].shape[-1]
    relative = relative_tolerance(held) if tolerance == "by dtype" else tolerance
    return _report(probe, said[0], said[1], relative, num_tokens=width)


def has_passed(folder: Path) -> bool:
    """Whether the last check of what is in ``folder`` passed; False if there was none."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("passed") is True


def write_record(report: VerifyReport, folder: Path, *, compared: str) -> Path:
    """Keep what was found beside what it was found of, as ``verify.json``."""
    record = {"compared": compared, "passed": report.passed, **asdict(report)}
    path = folder / RECORD
    write_text_aside(path, json.dumps(record, indent=2) + "\n", overwrite=True)
    return path


def _report(
    probe: Probe,
    found: torch.Tensor,
    bare: torch.Tensor,
    relative: float,
    *,
    num_tokens: int | None = None,
) -> VerifyReport:
    largest = float(probe.logits.abs().max())
    wanted = probe.logits.double().log_softmax(-1)
    got = found.double().log_softmax(-1)
    return VerifyReport(
        max_abs_diff=_largest(found - probe.logits),
        max_abs_logit=largest,
        tolerance=relative * largest,
        max_effect=_largest(found[..., :num_tokens] - bare),
        num_positions=probe.positions.numel(),
        top1_agreement=float((wanted.argmax(-1) == got.argmax(-1)).double().mean()),
        kl_divergence=float((wanted.exp() * (wanted - got)).sum(-1).mean()),
    )


def _weight_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """In full, also of a weight that is packed."""
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    for name, module in model.named_modules():
        if is_quantized_linear(module):
            shapes[f"{name}.weight"] = full_linear_shape(module)
    return shapes


def _largest(difference: torch.Tensor) -> float:
    """NaN if there is one, so that no comparison with a limit comes out true."""
    return float(difference.abs().max())
