import gzip
import json
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from harness.comparison import compare
from harness.report.downloads import downloads
from harness.store import Store
from tests.harness import sample


def test_the_files_hold_what_was_measured(tmp_path: Path) -> None:
    sample.write_cpu_history(tmp_path)
    comparison = compare(Store(tmp_path).load(sample.CPU_MACHINE), folder=tmp_path)
    found = re.findall(r'download="(\w+)\.json\.gz" href="data:application/gzip;base64,([^"]+)"', downloads(comparison))
    files: dict[str, Any] = {name: json.loads(gzip.decompress(b64decode(content))) for name, content in found}
    assert list(files) == ["comparison", "samples", "history"]
    assert [row["variant"] for row in files["comparison"]["rows"]] == [row.variant for row in comparison.rows]
    first = files["samples"][0]
    assert first["case"]["name"] == comparison.samples[0].case.name
    assert [len(times) for times in first["rounds"]] == [7, 7, 7]
    series, told = comparison.history[0], files["history"][0]
    assert told["commits"] == [point.commit.sha for point in series.points]
    assert told["ratio"] == pytest.approx([point.ratio.ratio for point in series.points], rel=1e-4)
    assert told["low"] == pytest.approx([point.ratio.low for point in series.points], rel=1e-4)
    assert told["high"] == pytest.approx([point.ratio.high for point in series.points], rel=1e-4)
    assert told["seconds"] == pytest.approx([point.seconds for point in series.points], rel=1e-4)
