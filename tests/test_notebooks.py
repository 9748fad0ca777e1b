"""Every notebook runs from top to bottom, with a smaller model and fewer points than it shows."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALLER = {"n_layer=4": "n_layer=2", "points=6": "points=3", "time_limit=4": "time_limit=1"}


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.slow
# The client and its kernel leave sockets and event loops to the garbage collector.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    text = path.read_text()
    for shown, smaller in SMALLER.items():
        assert shown in text
        text = text.replace(shown, smaller)
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3",
                   resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
