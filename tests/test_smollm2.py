"""The reference recipe's own model and rows: tp_size 3 equals one process, to four digits."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoTokenizer, PrinterCallback
from trl import SFTConfig

from tests.models import world_size
from tests.world import World
from tplora.adapter.attach import attach_adapter
from tplora.base.load import load_base
from tplora.base.source import resolve_model
from tplora.errors import SourceError
from tplora.recipe.check import read_recipe
from tplora.run.preflight import tokenize_recipe_rows
from tplora.train.parallelism import parallelism_config
from tplora.train.trainer import TploraSFTTrainer

pytestmark = pytest.mark.world

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2-135m-lora.toml"
NUM_STEPS = 5
PROMPT = "What does `len` do in Python?"


def _train(path, folder, recipe, rows):
    """Five real steps; what was logged, and the answer to a prompt afterwards."""
    datasets.disable_progress_bars()
    base = load_base(path, tp_size=world_size(), dtype=torch.float32)
    model = attach_adapter(base, LoraConfig(**recipe.lora))
    changes = {"max_steps": NUM_STEPS, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    changes |= {"eval_strategy": "no", "eval_on_start": False, "output_dir": str(folder)}
    changes |= {"report_to": "none", "disable_tqdm": True, "log_level": "error"}
    args = SFTConfig(
        **recipe.train | changes,
        dataset_kwargs={"skip_prepare_dataset": True},
        parallelism_config=parallelism_config(model),
    )
    tokenizer = AutoTokenizer.from_pretrained(path)
    trainer = TploraSFTTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return steps, _answer(model.eval(), tokenizer)


def _answer(model, tokenizer):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def reference():
    """The recipe, its model's folder and its first rows."""
    recipe = read_recipe(RECIPE)
    try:
        source = resolve_model(recipe.model, recipe_folder=RECIPE.parent)
    except SourceError as error:
        pytest.skip(f"the reference model is in no cache and cannot be downloaded: {error}")
    rows = next(iter(tokenize_recipe_rows(recipe))).dataset
    wanted = NUM_STEPS * recipe.train["per_device_train_batch_size"]
    return recipe, source.path, [rows[k] for k in range(wanted)]


def test_five_real_steps_at_tp_size_3_are_those_of_one_process(reference, tmp_path):
    recipe, path, rows = reference
    found = {}
    with World(1) as one, World(3) as three, ThreadPoolExecutor() as side_by_side:
        running = {
            world.size: side_by_side.submit(
                world.run, _train, path, tmp_path / str(world.size), recipe, rows, timeout_s=400
            )
            for world in (one, three)
        }
        for size, answer in running.items():
            results = answer.result()
            assert all(result == results[0] for result in results), f"ranks of {size} disagree"
            found[size] = results[0]
    (alone, answer_alone), (steps, answer) = found[1], found[3]
    assert len(steps) == len(alone) == NUM_STEPS
    for here, there in zip(steps, alone, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"):
            assert here[key] == pytest.approx(there[key], rel=1e-4), f"{here['step']}: {key}"
    assert alone[-1]["loss"] < alone[0]["loss"], "five steps taught it nothing"
    assert answer == answer_alone
    assert "len" in answer
