"""Whose directories and files are used, in which nobody else can change anything, and which are not."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kitsune import cache_files
from kitsune.cache_files import CacheDirectory, UnsafeCacheError
from tests.kitsune.second_user import HAS_SECOND_USER, OTHER


@pytest.fixture(autouse=True)
def _untold() -> Iterator[None]:
    cache_files._tell.cache_clear()
    yield
    cache_files._tell.cache_clear()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """An existing directory of the user alone."""
    path = tmp_path / "own"
    path.mkdir(mode=0o700)
    return path


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Files that belong to another user: really, or, where only root could do that, as far as they are asked."""
    if HAS_SECOND_USER:
        for path in paths:
            os.chown(path, OTHER, OTHER, follow_symlinks=False)
        return
    foreign, fstat = {path.lstat().st_ino for path in paths}, os.fstat

    def told(descriptor: int) -> os.stat_result:
        found = fstat(descriptor)
        return os.stat_result([*found[:4], OTHER, *found[5:]]) if found.st_ino in foreign else found

    monkeypatch.setattr(os, "fstat", told)


def test_what_is_missing_is_made_for_the_user_alone(tmp_path: Path) -> None:
    earlier = os.umask(0)
    try:
        with CacheDirectory.open(tmp_path / "a" / "b" / "cache", create=True) as directory:
            directory.write("file", b"content")
            with directory.locked("lock", 1.0), directory.folder("build-") as folder:
                assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    finally:
        os.umask(earlier)
    made = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "cache"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in made[-1].iterdir()} == {
        "file": 0o600, "lock": 0o600,
    }  # fmt: skip


def test_nothing_is_made_where_it_is_only_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CacheDirectory.open(tmp_path / "a" / "cache")
    assert not list(tmp_path.iterdir())


UNSAFE: dict[str, Callable[[pytest.MonkeyPatch, Path, Path], object]] = {
    "the group writes": lambda _, above, own: own.chmod(0o770),
    "others write": lambda _, above, own: own.chmod(0o702),
    "others write, sticky": lambda _, above, own: own.chmod(0o1777),
    "another user's": lambda patch, above, own: give_away(patch, own),
    "the group writes above": lambda _, above, own: above.chmod(0o775),
    "others write above": lambda _, above, own: above.chmod(0o777),
    "another user's above": lambda patch, above, own: give_away(patch, above),
    "another user's sticky one above": lambda patch, above, own: (above.chmod(0o1777), give_away(patch, above)),
}


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize("way", sorted(UNSAFE))
def test_what_others_can_change_is_not_used(
    way: str, create: bool, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = elsewhere / "above" / "cache"
    own.mkdir(parents=True)
    (own / "kept").write_text("")
    UNSAFE[way](monkeypatch, elsewhere / "above", own)
    culprit = elsewhere / "above" if "above" in way else own
    for _ in range(2):
        with pytest.raises(UnsafeCacheError, match=str(culprit)) as raised:
            CacheDirectory.open(own, create=create)
    assert "KITSUNE_CACHE_DIR" in str(raised.value)
    assert ("chmod" in str(raised.value)) == ("user" not in way), "only the user's own can be mended so"
    assert [(record.levelno, str(raised.value) in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]
    assert [path.name for path in own.iterdir()] == ["kept"]


@pytest.mark.parametrize("way", ["the group writes", "others write", "another user's"])
def test_nothing_is_made_in_what_others_can_change(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    UNSAFE[way](monkeypatch, elsewhere.parent, elsewhere)
    with pytest.raises(UnsafeCacheError):
        CacheDirectory.open(elsewhere / "a" / "cache", create=True)
    assert not list(elsewhere.iterdir())


def test_a_sticky_directory_above_will_do(elsewhere: Path) -> None:
    """As `/tmp`: nobody can rename what is another user's there."""
    elsewhere.chmod(0o1777)
    with CacheDirectory.open(elsewhere / "cache", create=True) as directory:
        directory.write("file", b"content")


LINKS: dict[str, Callable[[Path], Path]] = {
    "to the directory": lambda own: own / "real",
    "relative": lambda own: Path("real"),
    "back and forth": lambda own: Path("..") / own.name / "." / "real",
}


@pytest.mark.parametrize("kind", sorted(LINKS))
def test_a_link_of_the_users_is_followed(kind: str, elsewhere: Path) -> None:
    """A home on another disk, for one."""
    (elsewhere / "link").symlink_to(LINKS[kind](elsewhere))
    for create in (True, False):
        with CacheDirectory.open(elsewhere / "link" / "cache", create=create) as directory:
            directory.write("file", b"content")
    assert (elsewhere / "real" / "cache" / "file").read_bytes() == b"content"


def test_a_link_of_somebody_else_is_not_followed(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lie in `/tmp`, and lead to the user's own now, and elsewhere in a moment."""
    (elsewhere / "cache").mkdir()
    (elsewhere / "link").symlink_to(elsewhere / "cache")
    give_away(monkeypatch, elsewhere / "link")
    with pytest.raises(UnsafeCacheError, match="another user"):
        CacheDirectory.open(elsewhere / "link")


def test_a_link_leads_through_what_is_checked_too(elsewhere: Path) -> None:
    (elsewhere / "open").mkdir()
    (elsewhere / "open").chmod(0o777)
    (elsewhere / "open" / "cache").mkdir()
    (elsewhere / "link").symlink_to(elsewhere / "open" / "cache")
    with pytest.raises(UnsafeCacheError, match="others can write"):
        CacheDirectory.open(elsewhere / "link")


def test_links_in_a_circle_end(elsewhere: Path) -> None:
    (elsewhere / "a").symlink_to("b")
    (elsewhere / "b").symlink_to("a")
    with pytest.raises(OSError, match="a"):
        CacheDirectory.open(elsewhere / "a", create=True)


def test_what_is_no_directory_is_none(elsewhere: Path) -> None:
    for name, path in specials(elsewhere).items():
        if name in ("directory", "dangling link"):  # whose target is made
            continue
        with pytest.raises(OSError, match=r".") as raised:
            CacheDirectory.open(path, create=True)
        assert not isinstance(raised.value, UnsafeCacheError)


def test_a_relative_path_is_one_below_the_working_directory(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(elsewhere)
    with CacheDirectory.open(Path("cache"), create=True) as directory:
        directory.write("file", b"content")
    assert (elsewhere / "cache" / "file").exists()
    (elsewhere / "gone").mkdir()
    monkeypatch.chdir(elsewhere / "gone")
    (elsewhere / "gone").rmdir()
    with pytest.raises(FileNotFoundError):
        CacheDirectory.open(Path("cache"), create=True)


def test_a_directory_that_is_renamed_is_still_the_one(elsewhere: Path) -> None:
    with CacheDirectory.open(elsewhere / "cache", create=True) as directory:
        (elsewhere / "cache").rename(elsewhere / "moved")
        (elsewhere / "cache").mkdir()
        directory.write("file", b"content")
        assert directory.read("file", 10) == b"content"
        with directory.locked("lock", 0.1), directory.folder("build-") as folder:
            folder.write("part", b"")
            directory.take("part", folder, "part")
    assert not list((elsewhere / "cache").iterdir())
    assert {path.name for path in (elsewhere / "moved").iterdir()} == {"file", "lock", "part"}


def specials(folder: Path) -> dict[str, Path]:
    """What may have the name of a file, and is none."""
    (folder / "target").write_bytes(b"content")
    paths = {name: folder / name for name in ("pipe", "link", "dangling link", "directory", "socket", "second name")}
    os.mkfifo(paths["pipe"])
    paths["link"].symlink_to(folder / "target")
    paths["dangling link"].symlink_to(folder / "missing")
    paths["directory"].mkdir()
    os.mknod(paths["socket"], stat.S_IFSOCK | 0o600)
    paths["second name"].hardlink_to(folder / "target")
    if HAS_SECOND_USER:
        paths["device"] = folder / "device"
        os.mknod(paths["device"], 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # as many zeros as one reads
    return paths


def in_time(function: Callable[[], object]) -> BaseException | None:
    """What the function raises; it fails the test where it waits."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            function()
        except OSError as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20.0)
    assert raised, "it waits"
    return raised[0]


def locks(directory: CacheDirectory, name: str) -> None:
    with directory.locked(name, 0.1):
        pass


def test_special_files_are_neither_read_nor_locked(elsewhere: Path) -> None:
    paths = specials(elsewhere)
    with CacheDirectory.open(elsewhere) as directory:
        for name in paths:
            assert in_time(lambda name=name: directory.read(name, 100)) is not None, name  # type: ignore[misc]
            assert in_time(lambda name=name: locks(directory, name)) is not None, name  # type: ignore[misc]
    assert not (elsewhere / "missing").exists(), "a link's target was made"
    assert (elsewhere / "target").read_bytes() == b"content"


def test_special_files_are_replaced_and_nothing_is_written_through_them(elsewhere: Path) -> None:
    paths = specials(elsewhere)
    with CacheDirectory.open(elsewhere) as directory:
        for name in paths:
            error = in_time(lambda name=name: directory.write(name, b"new"))  # type: ignore[misc]
            assert (error is None) == (name != "directory"), name
            assert name == "directory" or directory.read(name, 10) == b"new"
    assert (elsewhere / "target").read_bytes() == b"content"
    assert not (elsewhere / "missing").exists()
    assert not list(elsewhere.glob("*.tmp"))


@pytest.mark.parametrize("way", ["the group writes", "others write", "another user's"])
def test_files_that_others_can_change_are_not_read(way: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "file").write_bytes(b"content")
    UNSAFE[way](monkeypatch, elsewhere, elsewhere / "file")
    with CacheDirectory.open(elsewhere) as directory, pytest.raises(PermissionError, match="remove it"):
        directory.read("file", 10)


def test_a_file_that_is_too_large_is_not_read(elsewhere: Path) -> None:
    (elsewhere / "file").touch(0o600)
    os.truncate(elsewhere / "file", 2**40)
    with CacheDirectory.open(elsewhere) as directory, pytest.raises(OSError, match="too large"):
        directory.read("file", 2**20)


def test_what_is_opened_is_not_handed_to_other_programs(elsewhere: Path) -> None:
    with CacheDirectory.open(elsewhere) as directory:
        directory.write("file", b"")
        file = directory.open_file("file")
        with directory.folder("build-") as folder:
            assert not any(map(os.get_inheritable, (directory.descriptor, folder.descriptor, file)))
        os.close(file)


def aged(path: Path, seconds: float) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


def test_what_was_not_written_for_long_is_swept_away(elsewhere: Path) -> None:
    for number in range(8):
        (elsewhere / f"file-{number}").touch()
        aged(elsewhere / f"file-{number}", 100.0 * (number + 1))
    (elsewhere / "file-folder").mkdir()
    (elsewhere / "file-folder" / "part").touch()
    aged(elsewhere / "file-folder", 5000.0)
    (elsewhere / "other").touch()
    aged(elsewhere / "other", 5000.0)
    with CacheDirectory.open(elsewhere) as directory:
        directory.sweep("file-*", most=9, most_seconds=650.0)
        assert {path.name for path in elsewhere.iterdir()} == {*(f"file-{number}" for number in range(6)), "other"}
        directory.sweep("file-*", most=2)
        assert {path.name for path in elsewhere.iterdir()} == {"file-0", "file-1", "other"}


def test_what_is_in_the_making_stays(elsewhere: Path) -> None:
    for number in range(3):
        (elsewhere / f"part-{number}").touch()
    with CacheDirectory.open(elsewhere) as directory:
        directory.sweep("part-*", most=0)
        assert len(list(elsewhere.iterdir())) == 3
        with directory.folder("part-") as folder:
            folder.write("part", b"")
            aged(folder.path, 1e6)
            with CacheDirectory.open(elsewhere) as other:
                other.sweep("part-*", most=0, most_seconds=1.0)
            assert folder.read("part", 10) == b""
        assert len(list(elsewhere.iterdir())) == 3, "it is removed when it is left"


def test_folders_of_killed_processes_are_swept_away(elsewhere: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with CacheDirectory.open(elsewhere) as directory, directory.folder("build-") as folder:
            folder.write("part", b"")
            os._exit(0)
    os.waitpid(pid, 0)
    (folder,) = elsewhere.iterdir()
    with CacheDirectory.open(elsewhere) as directory:
        directory.sweep("build-*", most=16, most_seconds=3600.0)
        assert folder.exists()
        aged(folder, 4000.0)
        directory.sweep("build-*", most=16, most_seconds=3600.0)
    assert not folder.exists()


def test_a_link_among_old_files_is_removed_and_not_followed(elsewhere: Path) -> None:
    (elsewhere / "kept").mkdir()
    (elsewhere / "kept" / "file").touch()
    (elsewhere / "part").symlink_to(elsewhere / "kept")
    os.utime(elsewhere / "part", (0, 0), follow_symlinks=False)
    with CacheDirectory.open(elsewhere) as directory:
        directory.sweep("part", most=16, most_seconds=3600.0)
    assert not (elsewhere / "part").is_symlink()
    assert (elsewhere / "kept" / "file").exists()


def test_elsewhere_than_on_linux_nothing_is_kept(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_files.sys, "platform", "darwin")
    with pytest.raises(UnsafeCacheError, match="cannot tell"):
        CacheDirectory.open(elsewhere)
