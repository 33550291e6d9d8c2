"""The command line: what it imports, refuses, prints and exits with."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tplora.cli import app
from tplora.errors import ArtifactError, LaunchError, PlanError, RecipeError
from tplora.launch.failure import format_traceback
from tplora.launch.launcher import launch
from tplora.run.folder import check_run_folder, clear_run_folder, find_adapter
from tplora.run.summary import RunSummary
from tplora.terminal.models import models_table
from tplora.terminal.report import environment_report
from tplora.terminal.shipped import copy_recipe, list_recipes
from tplora.terminal.show import show_error


def _run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def _heavy_imports(code: str) -> str:
    names = ("torch", "transformers", "peft", "trl", "datasets", "pydantic", "matplotlib", "rich")
    listing = f"{code}; import sys; print(*sorted(set(sys.modules) & set({names})), end='')"
    command = [sys.executable, "-c", listing]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_command_line_and_a_rank_start_without_heavy_imports():
    assert _heavy_imports("import tplora.cli, tplora.launch.rank") == ""


def test_help_names_every_command():
    shown = _run("--help").output
    commands = "finetune plan bench check export verify generate convert recipes report"
    assert all(f"  {name} " in shown for name in commands.split())


def test_a_mistake_is_one_red_line_on_stderr_and_status_1():
    command = [sys.executable, "-m", "tplora", "finetune", "nowhere.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: nowhere.toml: no such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.world
def test_a_mistake_found_in_a_rank_reaches_the_launcher_as_its_one_line(capfd):
    argv = ["-m", "tplora", "recipes", "copy", "nothing"]
    with pytest.raises(LaunchError, match=r"^recipes copy nothing: no such recipe"):
        launch(argv, num_processes=2, log_folder=None, env={})
    assert capfd.readouterr() == ("", "")


def test_a_wrong_option_is_a_usage_error_with_status_2():
    assert _run("finetune", "--owerwrite", "x.toml").exit_code == 2
    assert _run("finetun").exit_code == 2


def test_every_problem_has_its_own_line_and_keeps_its_brackets(capsys):
    error = RecipeError(["lora.target_modules[2] = 'qproj': no such layer", "data.train: missing"])
    show_error(type(error), error, None)
    assert capsys.readouterr().err == (
        "error: lora.target_modules[2] = 'qproj': no such layer\nerror: data.train: missing\n"
    )


def test_errors_are_red_on_a_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        command = [sys.executable, "-m", "tplora", "recipes", "copy", "nothing"]
        subprocess.run(command, stderr=theirs, check=False, timeout=60)
        os.close(theirs)
        assert b"\x1b[1;31merror:\x1b[0m recipes copy nothing: " in terminal.read(1000)


def test_any_other_exception_is_shown_by_its_last_frames(capsys):
    def fail(depth: int) -> None:
        if depth == 0:
            raise ZeroDivisionError("deep")
        fail(depth - 1)

    with pytest.raises(ZeroDivisionError) as caught:
        fail(30)
    show_error(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert shown.endswith("ZeroDivisionError: deep\n")
    assert "Previous line repeated 6 more times" in shown  # 10 frames, 3 of the 9 equal ones whole
    assert len(shown) < len(format_traceback(caught.value, max_frames=100))


def test_a_folder_that_holds_a_run_is_refused_and_overwrite_removes_only_the_run(tmp_path):
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    (run / "checkpoint-5").mkdir()
    (run / "notes.md").write_text("mine")
    with pytest.raises(ArtifactError, match=r"already holds a run \(adapter, .*--overwrite"):
        check_run_folder(run, overwrite=False)
    check_run_folder(run, overwrite=True)
    assert (run / "adapter").is_dir()
    clear_run_folder(run)
    assert os.listdir(run) == ["notes.md"]
    with pytest.raises(ArtifactError, match=r"is not empty \(notes.md\)"):
        check_run_folder(run, overwrite=False)


def test_overwrite_removes_what_tensorboard_was_told_and_no_other_run(tmp_path):
    """``runs/DAY_HOST/`` of this run; ``runs/NAME/`` is another, where the folder is ``.``."""
    own = tmp_path / "runs" / "Dec01_10-00-00_host"
    other = tmp_path / "runs" / "other" / "runs" / "Dec01_10-00-00_host"
    for folder in (own, other):
        folder.mkdir(parents=True)
        (folder / "events.out.tfevents.1.host.2.0").write_bytes(b"told")
    (tmp_path / "metrics.jsonl").touch()
    check_run_folder(tmp_path, overwrite=True)
    clear_run_folder(tmp_path)
    assert os.listdir(tmp_path) == ["runs"]
    assert os.listdir(tmp_path / "runs") == ["other"]
    assert len(list(other.iterdir())) == 1
    clear_run_folder(tmp_path / "runs" / "other")
    assert os.listdir(tmp_path / "runs" / "other") == []


def test_a_folder_with_nothing_but_the_logs_of_a_failed_start_is_free(tmp_path):
    (tmp_path / "logs").mkdir()
    check_run_folder(tmp_path, overwrite=False)
    check_run_folder(tmp_path / "new" / "deeper", overwrite=False)


def test_a_file_in_the_place_of_the_run_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ArtifactError):
        check_run_folder(tmp_path / "run", overwrite=True)


def test_an_adapter_is_found_in_a_run_or_by_itself(tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    with pytest.raises(ArtifactError, match="has no adapter"):
        find_adapter(tmp_path)
    (adapter / "adapter_config.json").write_text("{}")
    assert find_adapter(tmp_path) == find_adapter(adapter) == adapter


def test_a_summary_says_what_there_is_and_what_comes_next():
    facts = {"run": Path("runs/x"), "adapter": Path("runs/x/adapter"), "can_merge": True}
    nothing = {"first_eval_loss": None, "last_eval_loss": None, "verified_difference": None}
    assert RunSummary(**facts, **nothing).rows() == [("adapter", "runs/x/adapter")]
    known = {"first_eval_loss": 2.5, "last_eval_loss": 1.25, "verified_difference": 3.1e-6}
    rows = dict(RunSummary(**facts, **known).rows())
    assert rows["eval loss"] == "2.5000 -> 1.2500"
    assert "3.1e-06" in rows["verified"]
    commands = RunSummary(**facts, **known).next_commands()
    assert [command.split()[1] for command in commands] == ["generate", "verify", "export"]
    for command in commands:
        assert _run(command.split()[1], "--help").exit_code == 0
    experts = RunSummary(**facts | {"can_merge": False}, **known)
    assert not any("export" in command for command in experts.next_commands())


def test_models_are_listed_and_a_name_in_none_of_them_is_an_error():
    shown = _run("models", "llama4_text").stdout
    assert re.search(r"llama4_text +tp 2, 4 +float64 +cut +cut", shown)
    with pytest.raises(PlanError, match="'nonsense' is in no name"):
        models_table("nonsense")


def _shelf(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.jsonl").write_text("{}")
    (folder / "small.toml").write_text(
        "# tplora finetune recipes/small.toml\n#\n# A small run. It takes a minute.\n\n"
        '[data]\ntrain = "data/rows.jsonl"\neval = "owner/name"\n'
    )
    return folder


def test_recipes_are_listed_with_the_first_sentence_of_their_header(tmp_path):
    [recipe] = list_recipes(_shelf(tmp_path))
    assert (recipe.name, recipe.summary) == ("small", "A small run")
    assert list_recipes(tmp_path / "nowhere") == []


def test_a_recipe_is_copied_with_its_rows_and_never_over_anything(tmp_path):
    shelf, to = _shelf(tmp_path / "shelf"), tmp_path / "mine"
    copied = copy_recipe("small", folder=shelf, to=to)
    assert copied == [to / "small.toml", to / "data" / "rows.jsonl"]
    assert all(path.is_file() for path in copied)
    (to / "small.toml").unlink()
    with pytest.raises(ArtifactError, match=r"rows\.jsonl: exists already"):
        copy_recipe("small", folder=shelf, to=to)
    assert not (to / "small.toml").exists()
    with pytest.raises(RecipeError, match="copy smal: no such recipe; there are small"):
        copy_recipe("smal", folder=shelf, to=to)


def test_the_report_has_every_version_and_the_machine():
    found = dict(environment_report())
    assert {"python", "torch", "transformers", "peft", "trl", "CUDA", "GPUs"} <= set(found)
    assert all(found.values())
    assert "not installed" not in found.values()
    result = _run("report")
    assert result.exit_code == 0
    assert found["torch"] in result.output
