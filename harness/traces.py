"""The traces of profiled steps: ``results/<machine>/traces/<commit>/<run>-<case>-<device>-<variant>.json.gz``.

They lie beside the raw samples, but git ignores them: each is up to a mebibyte that compresses no further and is
measured again in seconds, and a commit has one for each variant of each case. Of each of these the newest is kept.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from harness.store import ResultsError
from harness.whole_files import write_whole

FOLDER = "traces"
_ENDING = ".json.gz"
_HASH_DIGITS = 12


class TraceFile:
    """The file for the trace of one variant of one case.

    Args:
        machine: the folder of the machine's results.
        commit: full hash of the commit.
        run: the identifier of the run.
        variant: case, device and variant, joined by dashes.
    """

    def __init__(self, machine: Path, commit: str, run: str, variant: str) -> None:
        self.name = f"{FOLDER}/{commit[:_HASH_DIGITS]}/{run}-{variant}{_ENDING}"
        """As results name it, relative to the machine's folder."""
        self._path = machine / self.name
        self._variant = variant

    def write(self, content: bytes) -> None:
        """Writes it, whole or not at all.

        Raises:
            ResultsError: it cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content)
        except OSError as error:
            raise ResultsError(self._path, f"cannot be written ({error.strerror}); free it and run again") from error

    def withdraw(self) -> None:
        """Removes it: nothing names it."""
        with suppress(OSError):
            self._path.unlink()

    def replace_earlier(self) -> None:
        """Removes those of earlier runs. One that cannot be removed only takes space."""
        for path in sorted(self._path.parent.glob(f"*-{self._variant}{_ENDING}")):
            if path != self._path:
                with suppress(OSError):
                    path.unlink()


def found(machine: Path, name: str) -> Path | None:
    """The file of a trace that results name; None where it is not: results may be copied without, and it be removed."""
    path = machine / name
    return path if path.is_file() else None
