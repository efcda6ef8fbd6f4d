"""runtime.files: whole or not at all."""

import os
import stat

import pytest

from runtime import UserError
from runtime.files import check_writable, replacing


def test_a_new_file_has_the_permissions_that_new_files_get(tmp_path):
    target, plain = tmp_path / "a.txt", tmp_path / "b.txt"
    with replacing(str(target)) as file:
        file.write("häh")
    plain.write_text("x", encoding="utf-8")
    assert target.read_text(encoding="utf-8") == "häh"
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "b.txt"]


def test_a_replaced_file_keeps_its_permissions_and_a_link_its_place(tmp_path):
    target, link = tmp_path / "a.txt", tmp_path / "link"
    target.write_text("old", encoding="utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    with replacing(str(link)) as file:
        file.write("new")
    assert (target.read_text(encoding="utf-8"), link.is_symlink()) == ("new", True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_failure_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old", encoding="utf-8")
    with pytest.raises(ZeroDivisionError), replacing(str(target)) as file:
        file.write("half")
        1 / 0  # noqa: B018
    assert target.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_looking_whether_a_file_can_be_written_leaves_no_trace(tmp_path):
    check_writable(str(tmp_path / "new.txt"), "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a folder"),
        ("none/x", "does not exist"),
        ("file/x", "is no folder"),
        ("fifo", "no regular file"),
        ("x" * 300, "too long"),
    ],
)
def test_what_can_not_be_written_is_refused_with_the_reason(tmp_path, name, reason):
    (tmp_path / "file").write_text("", encoding="utf-8")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match=rf"--out=.*{reason}"):
        check_writable(str(tmp_path / name), "out")
