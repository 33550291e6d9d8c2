"""What users read: README's names exist, its commands are the ones CI runs, examples run."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import tplora
from tests.tiny import write_checkpoint
from tests.train.tiny_tokenizer import tiny_tokenizer
from tests.world import CONTEXT

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_name_of_the_library_in_the_readme_exists():
    names = set(re.findall(r"tplora\.(\w+)", README)) - {"toml"}
    assert names
    assert not [name for name in names if not hasattr(tplora, name)]


def test_every_public_name_leads_somewhere():
    for name in tplora.__all__:
        assert getattr(tplora, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tplora.nothing


def test_the_library_block_is_python():
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(block, "README.md", "exec")


def test_ci_runs_the_commands_that_the_readme_shows():
    commands = [line.strip() for line in README.splitlines() if line.startswith("    pip install")]
    assert commands[0] == "pip install -e . && tplora finetune recipes/smollm2-135m-lora.toml"
    assert commands[1] == "pip install -e '.[test]' && pytest"
    script = (ROOT / ".ci" / "run").read_text()
    assert '$(readme "tplora finetune recipes/")' in script
    assert '$(readme "&& pytest")' in script


def test_nothing_heavy_is_imported_with_the_package():
    code = "import sys, tplora; sys.exit(int(bool({'torch', 'transformers'} & set(sys.modules))))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def _run_script(argv: list[str]) -> None:
    torch.set_num_threads(1)
    sys.argv = argv
    runpy.run_path(argv[0], run_name="__main__")


@pytest.mark.world
@pytest.mark.parametrize("example", ["plain_loop.py", "train_with_trl.py"])
def test_an_example_runs_on_two_ranks(example, tmp_path):
    """As `torchrun --standalone --nproc-per-node 2` runs it, in ranks that need no imports."""
    base = write_checkpoint("llama", tmp_path / "base", vocab_size=512)
    tiny_tokenizer().save_pretrained(base)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=example,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=CONTEXT.get_start_method(),
        logs_specs=DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.ALL),
    )
    argv = [str(ROOT / "examples" / example), str(base), str(tmp_path / "out")]
    elastic_launch(config, _run_script)(argv)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
