"""Rows joined into one sequence as trl joins them, and how far each is from what it is alone."""

import torch
import torch.nn.functional as F
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.zoo.build import VOCAB, build_model
from tests.zoo.double import Double

LENGTHS = (13, 3, 19, 1, 10)
"""Longer than a window, than a chunk and than what an indexer takes; and a single token."""


def tokens(vocab: int = VOCAB) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab, (length,), generator=draw) for length in LENGTHS]


def joined(found: list[torch.Tensor]) -> dict[str, object]:
    """What the model is given of joined rows."""
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": row.tolist()} for row in found])
    return {key: value for key, value in batch.items() if key != "labels"}


def stays_apart(model_type: str, attention: str | None = None) -> bool | None:
    """Whether logits and every gradient of joined rows are those of each row alone.

    None where the model has no such attention.
    """
    model = build_model(model_type).double().eval()  # some routers draw noise while they train
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    try:
        if attention is not None:
            model.set_attn_implementation(attention)
    except ValueError:
        return None
    given = tokens()
    with Double():
        alone = [model(input_ids=row[None], use_cache=False).logits for row in given]
        wanted = _gradients(model, alone, given)
        try:
            found = model(**joined(given), use_cache=False).logits.split(LENGTHS, 1)
        except ValueError as error:
            if "can't keep packed sequences apart" not in str(error):
                raise
            return False  # transformers' own word for layers that carry a state
        gradients = _gradients(model, found, given)
    largest = max(float(grad.norm()) for grad in wanted.values())
    errors = [_error(a.detach(), b.detach()) for a, b in zip(found, alone, strict=True)]
    errors += [_error(gradients[name], grad, 1e-7 * largest) for name, grad in wanted.items()]
    return max(errors) <= 1e-9


def _gradients(model, logits, given) -> dict[str, torch.Tensor]:
    loss = sum(
        F.cross_entropy(one[0, :-1], row[1:], reduction="sum")
        for one, row in zip(logits, given, strict=True)
    )
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def _error(found: torch.Tensor, wanted: torch.Tensor, floor: float = 0.0) -> float:
    return float((found - wanted).norm()) / max(float(wanted.norm()), floor, 1e-300)
