"""Every notebook runs from top to bottom, made small."""

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # the kernel's own libraries warn; the notebook's cells run in its process
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_SMOKE", "1")
    monkeypatch.setenv("KVLAB_RESULTS", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert not [o for cell in notebook.cells for o in cell.get("outputs", ()) if o["output_type"] == "error"]
