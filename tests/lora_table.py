"""``docs/lora.md``: what becomes of every field of ``LoraConfig``, and the test that holds it.

Run ``python -m tests.lora_table`` to write it; a test compares the file with what this would write.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig, CordaConfig, KasaConfig, LoraGAConfig

from tests.adapter import beside, initial, options
from tplora.plan.quantization import QuantizationPlan
from tplora.plan.quantized_options import find_adapter_config_problems
from tplora.recipe.lora_fields import INITS_IN_PYTHON, LORA_FIELDS, OWN_KEYS, REFUSED_INITS
from tplora.recipe.lora_rules import say_method

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "lora.md"

_ALWAYS = ("r", "lora_alpha", "target_modules", "task_type")
# Fields whose parity is shown elsewhere than by a case of tests/adapter/options.py.
_ELSEWHERE = {
    "lora_dropout": "tests/adapter/test_options.py::test_ten_steps_with_dropout_equal_one_process",
    "target_parameters": "tests/adapter/test_parameter.py::test_experts_equal_plain_peft",
}
_OPTIONS = "tests/adapter/test_options.py::test_ten_steps_equal_plain_peft"
_INITS = "tests/adapter/test_initial.py"
_BESIDE = "tests/adapter/test_trained.py::test_ten_steps_equal_plain_peft"


def proofs() -> dict[str, str]:
    """Every field that a parity test uses, and that test."""
    found = dict.fromkeys(_ALWAYS, _OPTIONS) | _ELSEWHERE
    for _, case in options.OPTIONS.values():
        found |= dict.fromkeys(case.changes, _OPTIONS)
    for case in initial.CASES.values():
        found = dict.fromkeys(case.changes, _INITS) | found
    for _, _, case in beside.RUNS.values():
        found = dict.fromkeys(case.changes, _BESIDE) | found
    return found


def missing_tests() -> list[str]:
    """Proofs that name a file or a function that is not there."""
    wrong = []
    for proof in set(proofs().values()):
        file, _, function = proof.partition("::")
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not text or (function and not re.search(rf"^def {function}\(", text, re.MULTILINE)):
            wrong.append(proof)
    return wrong


def page_text() -> str:
    """The page."""
    held = proofs()
    rows = []
    for field in dataclasses.fields(LoraConfig):
        rule = LORA_FIELDS[field.name]
        state = {"exact": "exact", "refused": "**refused**", "record": "kept"}[rule.state]
        only = f"only {', '.join(map(repr, rule.only))}" if rule.only else ""
        note = "; ".join(part for part in (only, rule.note) if part)
        test = held.get(field.name, "") if rule.state == "exact" else ""
        rows.append(f"| `{field.name}` | {state} | {note} | {_short(test)} |")
    inits = [f"| `{name!r}` | {_INIT_NOTES[name]} |" for name in _INIT_NOTES]
    inits += [f"| `{name!r}` | in Python: {why} |" for name, why in INITS_IN_PYTHON.items()]
    inits += [f"| `{name!r}` | **refused**: {why} |" for name, why in REFUSED_INITS.items()]
    own = [f"| `{name}` | {note} |" for name, note in OWN_KEYS.items()]
    methods = [f"| {name} | {say_method(name)} |" for name in ("IA3", "ADALORA", "PREFIX_TUNING")]
    return _PAGE.format(
        rows="\n".join(rows),
        quantized="\n".join(_quantized_rows()),
        inits="\n".join(inits),
        own="\n".join(own),
        methods="\n".join(methods),
    )


_ON_QUANTIZED: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias": {"bias": "all"},
    "alora_invocation_tokens": {"alora_invocation_tokens": [5]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"trainable_token_indices": [5]},
    "use_bdlora": {"use_bdlora": BdLoraConfig(nblocks=2, match_strict=False)},
    "kasa_config": {"kasa_config": KasaConfig()},
    **{
        f"init_lora_weights = {init!r}": {"init_lora_weights": init}
        for init in ("gaussian", "orthogonal", "pissa", "olora", "mica", "corda", "lora_ga")
    },
}


def _quantized_rows() -> list[str]:
    """Each option as a plan takes or refuses it, where the base is quantised."""
    rows = []
    for name, given in _ON_QUANTIZED.items():
        if name.endswith(("'corda'", "'lora_ga'")):
            field = f"{given['init_lora_weights']}_config"
            given = given | {field: CordaConfig() if "corda" in field else LoraGAConfig()}
        lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **given)
        four, eight = (_on_quantized(method, lora) for method in ("nf4", "int8"))
        rows.append(f"| `{name}` | {four} | {'the same' if four == eight != 'exact' else eight} |")
    rows.append("| `lora.loftq = true` | exact | **refused**: peft has it in 4 bits |")
    return rows


def _on_quantized(method: str, lora: LoraConfig) -> str:
    plan = QuantizationPlan(
        method=method, is_double=False, compute_dtype="float32", names=frozenset()
    )
    problems = find_adapter_config_problems(plan, lora)
    if not problems:
        return "exact"
    return f"**refused**: {problems[0].partition(f'is in {method}, ')[2].partition(';')[0]}"


def _short(test: str) -> str:
    return f"`{test.rpartition('/')[2].partition('::')[0]}`" if test else ""


_INIT_NOTES = {
    True: "the usual one, drawn in full from the seed, then cut",
    False: "for tests: B is drawn as well",
    "gaussian": "drawn in full from the seed, then cut",
    "orthogonal": "drawn in full from the seed, then cut",
    "pissa": "from the whole W of one layer at a time; `pissa_niter_N` as well",
    "olora": "as pissa",
    "mica": "as pissa; B is frozen, W stays",
}

_PAGE = """\
# LoRA's options

Written by `python -m tests.lora_table`.

**exact**: at every tp_size the run is plain PEFT's run in one process: full factors at the start,
loss, every gradient, ten AdamW steps with clipping and accumulation, the saved adapter read by
plain PEFT. **refused**: by name, before weights load. **kept**: says what an adapter is, and
computes nothing.

| field of `LoraConfig` | tp_size > 1 | how far, or why not | held by |
| --- | --- | --- | --- |
{rows}

## init_lora_weights

An init that takes something out of the base's weight (`"pissa"`, `"olora"`, `"corda"`, `"lora_ga"`)
is undone when the adapter is saved: the file is plain LoRA of twice the rank, for the base as it
was loaded.

| value | |
| --- | --- |
{inits}

## On a quantised base

What plain PEFT has on bitsandbytes' layers (`test_quantized.py`); the rest of the first table is as
on any base. Whole modules and experts are trained and adapted where they are not quantised. LoftQ
is PEFT's `replace_lora_weights_loftq`, in Python `tplora.replace_lora_weights_loftq(model)`.

| option | in 4 bits | in 8 bits |
| --- | --- | --- |
{quantized}

## Keys of `[lora]` that are tplora's own

| key | |
| --- | --- |
{own}

LoRA-FA is `tplora.train.optimizers.create_lorafa_optimizer(model, r=..., lora_alpha=..., lr=...)`.

## Several adapters

`add_adapter`, `load_adapter`, `set_adapter`, `disable_adapter`, `delete_adapter`,
`add_weighted_adapter` (every way of combining), `merge_adapter` and `unmerge_adapter` are PEFT's,
on cut factors. Rows of one batch cannot take different adapters (`adapter_names`).

## Other methods of PEFT

| `peft_type` | |
| --- | --- |
{methods}
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
