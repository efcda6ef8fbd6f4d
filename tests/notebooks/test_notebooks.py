"""Every notebook runs from top to bottom, and what is committed is the record of such a run.

After a change to a notebook, run it and save its outputs. From the repository's root, on an otherwise idle machine (it measures), with
an empty compilation cache (it shows what compiling costs), and without the time of day that `jupyter execute --inplace` would write:

    JAX_COMPILATION_CACHE_DIR=$(mktemp -d) python -c "
    import nbclient, nbformat
    path = 'notebooks/01_quickstart.ipynb'
    notebook = nbformat.read(path, as_version=4)
    nbclient.execute(notebook, cwd='notebooks', record_timing=False, coalesce_streams=True)
    nbformat.write(notebook, path)"
"""

import copy
import pathlib
import re

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted(pathlib.Path(__file__).parents[2].joinpath("notebooks").glob("*.ipynb"))
SECONDS = 600  # per cell: one that compiles a handful of programs takes a tenth of it on an idle machine
MACHINE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|opt|usr|work|Users|content)/|site-packages|[A-Z]:\\Users")


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """What a cell's outputs are, without their contents: they are times, plots, and text that may depend on the machine."""
    return {output.get("name") or output.output_type for output in cell.outputs}


def texts(cell):
    for output in cell.outputs:
        data = output.get("data", {})
        yield from (output.get("text", ""), data.get("text/plain", ""), data.get("text/html", ""))


@pytest.fixture(params=NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def path(request):
    return request.param


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_the_committed_outputs_are_of_one_run_from_top_to_bottom(path):
    cells = code_cells(nbformat.read(path, as_version=4))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(kinds(cell) & {"error", "stderr"} for cell in cells)
    assert all(cell.outputs for cell in cells[1:])  # the first one installs, which is nothing in a checkout


def test_the_committed_file_tells_nothing_about_the_machine_that_ran_it(path):
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert "execution" not in cell.metadata  # the time of day
    for cell in code_cells(notebook):
        for text in texts(cell):
            assert not MACHINE.search(text), text


@pytest.mark.usefixtures("smollm2_path")  # fetched before, so that no cell shows a download's progress
def test_a_notebook_runs_and_leaves_the_outputs_that_are_committed(path):
    before = path.read_bytes()
    committed = nbformat.read(path, as_version=4)
    executed = copy.deepcopy(committed)
    for cell in code_cells(executed):
        cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(
        executed, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()  # raises CellExecutionError, with the cell and its traceback
    assert path.read_bytes() == before
    assert [cell.source for cell in executed.cells] == [cell.source for cell in committed.cells]
    for ours, theirs in zip(code_cells(executed), code_cells(committed), strict=True):
        assert kinds(ours) == kinds(theirs), f"{theirs.source}\n\ngives {kinds(ours)}, committed is {kinds(theirs)}: run the notebook again"
