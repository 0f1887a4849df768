"""Where a file is written whole, and what is written to as it is."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.whole_files import read_whole, write_whole
from tests.harness.checkout import ROOT


@pytest.mark.parametrize("is_there", [True, False])
def test_links_are_followed_to_the_file_that_is_replaced(tmp_path: Path, is_there: bool) -> None:
    (tmp_path / "published").mkdir()
    target, link, longer = tmp_path / "published" / "page.html", tmp_path / "page.html", tmp_path / "longer.html"
    if is_there:
        target.write_bytes(b"old")
    link.symlink_to(Path("published") / "page.html")
    longer.symlink_to(link)

    write_whole(longer, b"new")

    assert longer.is_symlink()
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_bytes() == b"new"
    assert len(list(tmp_path.rglob("*"))) == 4


def test_a_pipe_is_no_file_to_read_whole(tmp_path: Path) -> None:
    """It would keep its reader waiting."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_whole(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_whole(tmp_path / "link") == b"content"


def test_links_that_end_nowhere_are_an_error_and_left_as_they_are(tmp_path: Path) -> None:
    circle, lost = tmp_path / "circle", tmp_path / "lost"
    circle.symlink_to(circle)
    lost.symlink_to(tmp_path / "absent" / "page.html")
    for link in (circle, lost):
        with pytest.raises(OSError, match=r"symbolic links|No such file"):
            write_whole(link, b"new")
        assert link.is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()

    write_whole(pipe, b"new")

    reader.join(timeout=60)
    assert read == [b"new"]
    assert pipe.is_fifo()


def test_an_open_descriptor_is_written_to() -> None:
    reader, writer = os.pipe()
    write_whole(Path(f"/proc/self/fd/{writer}"), b"new")
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == b"new"


@pytest.mark.parametrize("name", ["/proc/self/fd/1", "printed.txt"])
def test_a_file_that_is_standard_output_keeps_what_is_printed(tmp_path: Path, name: str) -> None:
    code = (
        "import sys; from pathlib import Path; from harness.whole_files import write_whole\n"
        "print('before', flush=True); write_whole(Path(sys.argv[1]), b'document\\n'); print('after')"
    )
    printed = tmp_path / "printed.txt"
    with printed.open("wb") as file:
        subprocess.run(
            [sys.executable, "-c", code, name], stdout=file, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True
        )
    assert printed.read_text() == "before\ndocument\nafter\n"
