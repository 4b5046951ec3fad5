"""Drawing a report leaves the caller's plots alone."""

import matplotlib
import pandas as pd

from kvlab.experiment import picture


def test_a_report_leaves_the_backend_of_the_caller(tmp_path):
    matplotlib.use("svg")
    frame = pd.DataFrame(
        {"policy": ["full"], "accuracy": [1.0], "accuracy_low": [0.9], "accuracy_high": [1.0], "resident_bytes": [9e5]}
    )
    made = picture.draw(frame, tmp_path / "x.png")
    assert made.read_bytes().startswith(b"\x89PNG")
    assert matplotlib.get_backend() == "svg"
