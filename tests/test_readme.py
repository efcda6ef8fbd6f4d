"""What the README shows must run as it stands there."""

import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_programs_to_run():
    assert len(PROGRAMS) == 3


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=["text", "jitted functions", "mesh"])
def test_a_program_of_the_readme_runs_and_prints_an_answer(program, capsys):
    exec(compile(program, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 100


@pytest.mark.slow
def test_the_two_programs_of_the_readme_agree_on_the_first_words(capsys):
    exec(compile(PROGRAMS[1], "README.md", "exec"), {})
    by_hand = capsys.readouterr().out
    exec(compile(PROGRAMS[0], "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith(by_hand[:60])


def test_every_room_of_the_readme_exists_and_is_packaged():
    rooms = re.findall(r"^\| [\d-] \| `(\w+)/` \|", README, flags=re.MULTILINE)
    assert "kv" in rooms
    packaged = (ROOT / "setup.cfg").read_text(encoding="utf-8").split("packages =")[1].split("py_modules")[0].split()
    assert sorted(rooms) == sorted(name for name in packaged if "." not in name)


def test_the_python_versions_agree():
    required = (ROOT / "setup.cfg").read_text(encoding="utf-8").split("python_requires = >=")[1].split()[0]
    target = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["target-version"]
    assert target == "py" + required.replace(".", "")
