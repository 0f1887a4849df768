"""The table of what loops may do around Kitsune, made from the tests: `python -m tests.support` writes docs/support.md.

A test that carries `@pytest.mark.support(area, what, how)` shows that `what` works, in the way `how`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "support.md"

REPLAYED = "replayed"
IN_PART = "replayed, but for the update"
STEPS_ASIDE = "plain PyTorch, with a reason"
RAISES = "raises, as in plain PyTorch"
HOW = (REPLAYED, IN_PART, STEPS_ASIDE, RAISES)

_HEAD = """\
# What loops may do

Every line is shown by tests, in which the same training runs with and without Kitsune and must leave the same behind:
losses, parameters, buffers, optimizer state, gradients and random numbers. This file is made from their marks
(`python -m tests.support`).

"replayed" means that captured graphs ran, and that everything came out as without; "replayed, but for the update" that
the optimizer runs its own `step()`, and `status()` says why; "plain PyTorch, with a reason" that nothing is accelerated
then; "raises, as in plain PyTorch" that the error is the same. Tests that need a GPU or take long have to be asked for.

Which models of timm and transformers are captured, and why others are not, is in [coverage.md](coverage.md).
"""


class Claim(NamedTuple):
    """What one test shows."""

    area: str
    what: str
    how: str
    path: str
    test: str


def claims(folder: Path = ROOT / "tests") -> list[Claim]:
    """Those of all tests, in the order of the files.

    Raises:
        ValueError: a mark has other than three texts, or an unknown `how`.
    """
    return [claim for file in sorted(folder.rglob("test_*.py")) for claim in _claims_of(file)]


def document(found: list[Claim]) -> str:
    """The text of the file: a table for each area, in which equal lines are one."""
    parts = [_HEAD]
    for area in sorted({claim.area for claim in found}):
        lines: dict[tuple[str, str], list[Claim]] = {}
        for claim in found:
            if claim.area == area:
                lines.setdefault((claim.what, claim.how), []).append(claim)
        rows = [f"| {what} | {how} | {_links(shown)} |" for (what, how), shown in lines.items()]
        parts.append("\n".join([f"## {area}", "", "| what | how | tests |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _claims_of(file: Path) -> Iterator[Claim]:
    path = file.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.support":
                texts = [one.value for one in mark.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                if len(texts) != 3 or texts[2] not in HOW:
                    raise ValueError(f"{path}, line {mark.lineno}: support(area, what, how), with how one of {HOW}")
                yield Claim(*texts, path, node.name)


def _links(shown: list[Claim]) -> str:
    return ", ".join(f"[{claim.test.removeprefix('test_')}](../{claim.path})" for claim in shown)


if __name__ == "__main__":
    DOCUMENT.write_text(document(claims()), encoding="utf-8")
    print(f"{DOCUMENT.relative_to(ROOT)} is up to date")
