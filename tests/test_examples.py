"""The scripts for schedulers: they parse, and tplora understands the command in them."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from tplora.cli import app
from tplora.launch.nodes import Nodes
from tplora.mesh import PREEMPTED

EXAMPLES = Path(__file__).parents[1] / "examples"
# What the schedulers put in.
VALUES = {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "JOB_COMPLETION_INDEX": "3"}


def _understood(command: str) -> dict[str, object]:
    """The options of ``tplora finetune ...`` as our own command line reads them."""
    for name, value in VALUES.items():
        command = command.replace(f"${name}", value)
    words = shlex.split(command)
    words = words[words.index("tplora") + 1 :]
    group = typer.main.get_command(app)
    name, finetune, rest = group.resolve_command(group.make_context("tplora", [*words]), words)
    assert name == "finetune"
    return finetune.make_context(name, rest).params


def _check(params: dict[str, object]) -> None:
    assert (params["nnodes"], params["node_rank"]) == (4, 3)
    assert params["resume_or_start"]
    assert params["max_restarts"] > 0
    Nodes(num_nodes=4, node_rank=3, endpoint=str(params["rdzv_endpoint"])).check()


def test_the_script_for_slurm_is_bash_and_its_command_is_ours():
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    command = re.search(r"exec (tplora .*?)\n'", text, re.DOTALL).group(1).replace("\\\n", " ")
    for number, value in enumerate(["recipe.toml", "/shared/run", "node-0", "29400"], start=1):
        command = command.replace(f"${number}", value)
    _check(_understood(command))
    assert f'"$status" -eq {PREEMPTED}' in text
    assert re.search(r"^#SBATCH --signal=TERM@\d+$", text, re.MULTILINE), "to srun, not the script"


def test_the_jobset_for_kubernetes_is_yaml_and_its_command_is_ours():
    jobset = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert jobset["kind"] == "JobSet"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 4
    (container,) = job["template"]["spec"]["containers"]
    (command,) = container["args"]
    assert command.startswith("exec tplora "), "SIGTERM has to reach the launcher"
    params = _understood(command)
    _check(params)
    name, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert params["rdzv_endpoint"] == f"{name}-{replicated}-0-0.{name}:29400"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [PREEMPTED]
    assert rule["onExitCodes"]["containerName"] == container["name"]


@pytest.mark.parametrize("page", ["docs/nodes.md"])
def test_the_page_names_every_option_and_exit_code(page):
    text = (EXAMPLES.parent / page).read_text()
    options = ["--nnodes", "--node-rank", "--rdzv-endpoint", "--nproc-per-node", "--max-restarts"]
    assert all(f"`{option}`" in text or option in text for option in options)
    assert f"| {PREEMPTED} |" in text
