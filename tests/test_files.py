# ruff: noqa: PT012  (what the block of a context manager does is the subject here)
import errno
import os
import stat
from pathlib import Path

import pytest

from tplora.errors import ArtifactError
from tplora.files import check_writable, file_written_aside, write_text_aside, written_aside


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_only_when_its_block_has_ended(tmp_path):
    target = tmp_path / "deep" / "adapter"
    with written_aside(target) as aside:
        (aside / "sub").mkdir()
        (aside / "sub" / "file").write_text("whole")
        assert aside.parent == target.parent
        assert not target.exists()
    assert (target / "sub" / "file").read_text() == "whole"
    assert _names(target.parent) == ["adapter"]


def test_a_failed_block_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), written_aside(tmp_path / "adapter") as aside:
        (aside / "file").write_text("half")
        raise KeyboardInterrupt
    assert _names(tmp_path) == []


def test_an_existing_folder_is_refused_before_the_block_runs(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old").write_text("kept")
    with pytest.raises(ArtifactError, match="exists already"), written_aside(tmp_path / "adapter"):
        pytest.fail("the block ran")
    assert _names(tmp_path / "adapter") == ["old"]


def test_a_folder_that_appeared_meanwhile_is_not_replaced(tmp_path):
    target = tmp_path / "adapter"
    with pytest.raises(ArtifactError, match="exists already"), written_aside(target) as aside:
        (aside / "loser").touch()
        target.mkdir()
        (target / "winner").touch()
    assert _names(target) == ["winner"]
    assert _names(tmp_path) == ["adapter"]


def test_overwriting_replaces_every_file_and_keeps_the_old_ones_on_failure(tmp_path):
    target = tmp_path / "adapter"
    with written_aside(target) as aside:
        (aside / "old").touch()
    with pytest.raises(ValueError, match="mid"), written_aside(target, overwrite=True) as aside:
        (aside / "new").touch()
        raise ValueError("mid")
    assert _names(target) == ["old"]
    with written_aside(target, overwrite=True) as aside:
        (aside / "new").touch()
        assert _names(target) == ["old"]
    assert _names(target) == ["new"]
    assert _names(tmp_path) == ["adapter"]


def test_the_old_folder_comes_back_when_the_swap_fails(tmp_path, monkeypatch):
    target = tmp_path / "adapter"
    with written_aside(target) as aside:
        (aside / "old").touch()
    rename, calls = Path.rename, []

    def fail_second(self, to):
        calls.append(self)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error", str(self))
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_second)
    with (
        pytest.raises(ArtifactError, match="cannot be written"),
        written_aside(target, overwrite=True) as aside,
    ):
        (aside / "new").touch()
    assert _names(target) == ["old"]
    assert _names(tmp_path) == ["adapter"]


def test_overwriting_through_a_link_replaces_the_folder_and_not_the_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with written_aside(tmp_path / "link", overwrite=True) as aside:
        (aside / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert _names(tmp_path / "real") == ["new"]


def test_a_file_is_not_replaced_by_a_folder_nor_a_folder_by_a_file(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(ArtifactError, match="is a file, a folder is to be"),
        written_aside(tmp_path / "file", overwrite=True),
    ):
        pytest.fail("the block ran")
    with pytest.raises(ArtifactError, match="is a folder, a file is to be"):
        write_text_aside(tmp_path / "folder", "x", overwrite=True)


def test_files_made_private_by_their_writer_get_the_mode_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with written_aside(tmp_path / "adapter") as aside:
            os.close(os.open(aside / "private", os.O_CREAT | os.O_WRONLY, 0o600))
        with file_written_aside(tmp_path / "file") as aside:
            aside.unlink()
            os.close(os.open(aside, os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "adapter" / "private").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_file_appears_whole_and_is_replaced_only_when_asked(tmp_path):
    target = tmp_path / "plan.txt"
    write_text_aside(target, "one")
    with file_written_aside(target, overwrite=True) as aside:
        assert aside.suffix == ".txt"
        aside.write_text("one")
    with pytest.raises(ArtifactError, match="exists already"):
        write_text_aside(target, "two")
    with (
        pytest.raises(ValueError, match="mid"),
        file_written_aside(target, overwrite=True) as aside,
    ):
        aside.write_text("half")
        raise ValueError("mid")
    assert target.read_text() == "one"
    write_text_aside(target, "two", overwrite=True)
    assert target.read_text() == "two"
    assert _names(tmp_path) == ["plan.txt"]


def test_a_full_disk_is_said_in_one_line_and_other_errors_pass(tmp_path):
    with pytest.raises(ArtifactError, match="disk is full"), written_aside(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), written_aside(tmp_path / "a"):
        Path(tmp_path / "missing input").read_text()


def test_check_writable_leaves_nothing_and_creates_nothing(tmp_path):
    check_writable(tmp_path / "runs" / "new")
    check_writable(tmp_path)
    assert _names(tmp_path) == []


def test_check_writable_finds_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(ArtifactError, match=r"runs is in the way and not a folder"):
        check_writable(tmp_path / "runs" / "new")


def test_check_writable_finds_a_link_to_nowhere(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match="in the way"):
        check_writable(tmp_path / "runs" / "new")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses root")
def test_check_writable_finds_what_even_root_may_not_write():
    with pytest.raises(ArtifactError, match="nothing can be created in /proc"):
        check_writable(Path("/proc/new"))


@pytest.mark.skipif(os.geteuid() == 0, reason="mode bits do not bind root")
def test_check_writable_finds_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ArtifactError, match="Permission denied"):
            check_writable(tmp_path / "new")
    finally:
        tmp_path.chmod(0o700)
