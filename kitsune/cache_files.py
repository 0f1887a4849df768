"""The files that Kitsune keeps on disk, in a directory that nobody but the user can change.

Code is loaded from there. Other users of the machine must therefore be able neither to write to the directory or its
files, nor to exchange a directory or a link on the way to it. Where they could, nothing is loaded, built or written:
Kitsune goes on without, and one warning says what to do.
"""

from __future__ import annotations

import errno
import fnmatch
import functools
import logging
import math
import os
import secrets
import shutil
import stat
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

try:
    import fcntl
except ImportError:  # Windows, where no directory is opened
    fcntl = None  # type: ignore[assignment]

from kitsune.errors import KitsuneError, Refusal

_MOST_LINKS = 40  # as Linux allows
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ELSEWHERE = "set KITSUNE_CACHE_DIR to a directory of your own"
_SETTLED_SECONDS = 60.0
"""What was written so recently may be in the making."""

# A link is an error, a pipe or a device keeps nobody waiting, and programs that are started get no descriptor.
_WARILY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY if sys.platform == "linux" else 0

_log = logging.getLogger("kitsune")


class UnsafeCacheError(KitsuneError, OSError):
    """Somebody else could change what would be read, built or written.

    Attributes:
        refusal: what stands in the way, and what the user can do.
    """

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        self.refusal = Refusal(reason, remedy=remedy)
        super().__init__(str(self.refusal))


class CacheDirectory:
    """A directory of the user alone, held open: whatever is renamed meanwhile, names are looked up in this one.

    A context, which closes it.

    Attributes:
        path: where it was found; for messages.
        descriptor: of the directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> CacheDirectory:
        """The directory at `path`. With `create` it is made where it is missing, and those above it, for the user only.

        Raises:
            UnsafeCacheError: somebody else could change it, or what leads to it. Each reason is logged once.
            OSError: there is none, or it cannot be made or opened.
        """
        try:
            return cls(path, _opened(path, create))
        except UnsafeCacheError as error:
            _tell(str(error))
            raise

    def __enter__(self) -> CacheDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.descriptor)

    def open_file(self, name: str) -> int:
        """A descriptor, for reading, of a regular file of the user's own that nobody else can write to.

        It never waits, whatever has that name.

        Raises:
            OSError: there is none, or it is something else.
        """
        descriptor = os.open(name, os.O_RDONLY | _WARILY, dir_fd=self.descriptor)
        try:
            self._check(name, os.fstat(descriptor), _OTHERS_WRITE)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def read(self, name: str, most_bytes: int) -> bytes:
        """What is in a file.

        Raises:
            OSError: as `open_file`, or there is more in it.
        """
        descriptor = self.open_file(name)
        try:
            return content(descriptor, most_bytes)
        finally:
            os.close(descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file as a whole, or does nothing.

        Raises:
            OSError: it cannot be written.
        """
        temporary, flags = f"{name}.{secrets.token_hex(8)}.tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | _WARILY
        descriptor = os.open(temporary, flags, 0o600, dir_fd=self.descriptor)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            self.take(temporary, self, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self.descriptor)
            raise

    def take(self, name: str, folder: CacheDirectory, new_name: str) -> None:
        """Moves a file of `folder` here, in place of what has the new name.

        Raises:
            OSError: it cannot be moved.
        """
        os.replace(name, new_name, src_dir_fd=folder.descriptor, dst_dir_fd=self.descriptor)

    def touch(self, name: str) -> None:
        """As if the file were written now: what is used stays when others are removed."""
        with suppress(OSError):
            os.utime(name, dir_fd=self.descriptor, follow_symlinks=False)

    @contextmanager
    def locked(self, name: str, most_seconds: float) -> Iterator[None]:
        """Holds the lock of a file, which is made where it is missing; goes on without it after so many seconds.

        Raises:
            OSError: something else has that name.
        """
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | _WARILY, 0o600, dir_fd=self.descriptor)
        try:
            self._check(name, os.fstat(descriptor), 0)  # there is nothing in it
            deadline = time.monotonic() + most_seconds
            while not _lock(descriptor) and time.monotonic() < deadline:
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def folder(self, prefix: str) -> Iterator[CacheDirectory]:
        """A new directory in this one, removed afterwards, and locked: no `sweep` removes it before.

        Raises:
            OSError: there can be none.
        """
        name = f"{prefix}{secrets.token_hex(4)}"
        os.mkdir(name, 0o700, dir_fd=self.descriptor)
        try:
            with self._within(name) as folder:
                _lock(folder.descriptor)
                yield folder
        finally:
            self._remove(name)

    def sweep(self, pattern: str, *, most: int, most_seconds: float = math.inf) -> None:
        """Removes files and folders with names of that pattern: all but so many that were written last, and older ones.

        What may be in the making stays: what was written in the last minute, and locked folders.
        """
        now = time.time()
        ages = {name: abs(now - written) for name, written in self._written(pattern)}  # clocks may be set back
        for place, name in enumerate(sorted(ages, key=lambda name: (ages[name], name))):
            is_old = ages[name] > _SETTLED_SECONDS and (place >= most or ages[name] > most_seconds)
            if is_old and not self._is_in_use(name):
                self._remove(name)

    def _written(self, pattern: str) -> Iterator[tuple[str, float]]:
        for name in fnmatch.filter(os.listdir(self.descriptor), pattern):
            with suppress(FileNotFoundError):  # another process removes them too
                yield name, os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime

    def _is_in_use(self, name: str) -> bool:
        """Whether it is a folder in which another process is at work."""
        try:
            with self._within(name) as folder:
                return not _lock(folder.descriptor)
        except OSError:  # no folder
            return False

    def _within(self, name: str) -> CacheDirectory:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _WARILY, dir_fd=self.descriptor)
        return CacheDirectory(self.path / name, descriptor)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            try:
                os.unlink(name, dir_fd=self.descriptor)
            except IsADirectoryError:
                shutil.rmtree(f"/proc/self/fd/{self.descriptor}/{name}")

    def _check(self, name: str, status: os.stat_result, forbidden_mode: int) -> None:
        is_own = status.st_uid == os.geteuid() and not status.st_mode & forbidden_mode
        if not (is_own and stat.S_ISREG(status.st_mode) and status.st_nlink <= 1):
            reason = "no regular file that you alone can write to, and by this name alone; remove it"
            raise OSError(errno.EPERM, reason, str(self.path / name))


def content(descriptor: int, most_bytes: int) -> bytes:
    """What is in a file.

    Raises:
        OSError: it cannot be read, or there is more in it.
    """
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes > most_bytes:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return os.pread(descriptor, num_bytes, 0)


def _opened(path: Path, create: bool) -> int:
    """A descriptor of the directory.

    Each part of the path is looked up in the directory before it, which was checked and is held open, and so are the
    targets of links. So what is opened is what was checked.
    """
    if sys.platform != "linux":
        raise UnsafeCacheError(f"on this system Kitsune cannot tell whether others can change {path}")
    os.path.exists(path)  # what is mounted on demand is mounted now: the descriptors below would not do that
    parts, where, directory, num_links = deque((Path.cwd() / path).parts), Path(), -1, 0
    with ExitStack() as held:
        while parts:
            part = parts.popleft()
            found = _looked_up(part, directory, create)
            held.callback(os.close, found)
            status = os.fstat(found)
            if stat.S_ISLNK(status.st_mode) and num_links < _MOST_LINKS:
                _check_owner(where / part, status)
                parts.extendleft(reversed(Path(os.readlink("", dir_fd=found)).parts))
                num_links += 1
                continue
            where, directory = where / part, found
            if not stat.S_ISDIR(status.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(where))
            check = _check_above if parts else _check_own
            check(where, status)
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)


def _looked_up(name: str, directory: int, create: bool) -> int:
    """A descriptor that stands for what has that name in a directory, or for the root, by which nothing is opened."""
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        if not create:
            raise
    with suppress(FileExistsError):  # by another process
        os.mkdir(name, 0o700, dir_fd=directory)
    return os.open(name, flags, dir_fd=directory)


def _check_own(where: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UnsafeCacheError(f"{where} belongs to another user (number {status.st_uid})", _ELSEWHERE)
    _check_mode(where, status, "-R go-w")


def _check_above(where: Path, status: os.stat_result) -> None:
    """In a sticky directory, as `/tmp` is, others can exchange nothing that is not theirs."""
    _check_owner(where, status)
    if not status.st_mode & stat.S_ISVTX:
        _check_mode(where, status, "go-w")


def _check_owner(where: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        reason = f"{where} belongs to another user (number {status.st_uid}), who can exchange what is found there"
        raise UnsafeCacheError(reason, _ELSEWHERE)


def _check_mode(where: Path, status: os.stat_result, change: str) -> None:
    if status.st_mode & _OTHERS_WRITE:
        reason = f"others can write to {where} (its mode is {stat.S_IMODE(status.st_mode):04o})"
        raise UnsafeCacheError(reason, f"run chmod {change} {where}, or {_ELSEWHERE}")


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock. It is held from now on, where the file system knows locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # it knows none
        return True
    return True


@functools.cache
def _tell(reason: str) -> None:
    """Once for each reason."""
    _log.warning("nothing is loaded from disk or kept there, and nothing in C is built: %s", reason)
