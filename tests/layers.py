"""The import layers of the project, and the check that keeps them: `python -m tests.layers`.

`kitsune` is layered as in `LAYERS`; it never imports `harness` or `models`. `models` stands alone. `harness` uses
`models` and, of `kitsune`, only the names that `kitsune/__init__.py` exports. Imports inside functions and under
`TYPE_CHECKING` count like any other: a type is a dependency too.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_EVERYWHERE = ("errors", "config", "collection", "background")
_FACES = ("step", "optimizer")

LAYERS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "config": ("errors",),
    "cache_files": ("errors",),
    "collection": (),
    "background": ("errors",),  # what whoever times or records must know of
    "bucketing": (),
    "budget": (),  # what captures take, and may take
    "status": ("plan", "memory"),  # values: the loop makes them, the faces hand them out
    "verification": (),
    "device": (),  # what this machine can do
    "native": ("cache_files",),
    "graph": (),
    "numerics": (),
    "plan": ("graph",),
    "timing": ("device", "cache_files"),
    "kernels": ("device", "timing"),
    "capture": ("device", "native", "graph", "kernels"),
    "passes": ("device", "graph", "kernels", "timing"),
    "fusion": ("device", "graph", "kernels", "timing", "plan"),
    "schedule": ("device", "plan", "graph", "timing"),
    "memory": ("device", "plan", "graph"),
    "execution": ("device", "native", "graph", "plan", "kernels", "memory"),
    "engine": (
        "device",
        "cache_files",
        "native",
        "numerics",
        "status",
        "capture",
        "graph",
        "kernels",
        "passes",
        "plan",
        "schedule",
        "memory",
        "execution",
        "fusion",
        "timing",
        "budget",
        "fallback",
    ),
    "fallback": ("budget", "timing"),
    "loop": (
        "status",
        "verification",
        "device",
        "native",
        "graph",
        "numerics",
        "plan",
        "timing",
        "capture",
        "passes",
        "fusion",
        "schedule",
        "memory",
        "execution",
        "budget",
        "fallback",
        "engine",
    ),
}
LAYERS |= dict.fromkeys(_FACES, (*LAYERS, *_FACES))
LAYERS |= dict.fromkeys(("verify", "status_of"), tuple(LAYERS))
"""For each module or package of `kitsune`, which others it may import; besides these, itself and `_EVERYWHERE`."""

_KITSUNE_REQUIRES = ("torch", "triton")
_DUNDERS = ("__file__", "__name__", "__version__")


@dataclass(frozen=True)
class Violation:
    """One import that the layers forbid: `path` (relative to the root), `line`, and what is wrong."""

    path: Path
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


@dataclass(frozen=True)
class _Import:
    target: str  # dotted module, as far as the statement names one
    name: str | None  # X of `from target import X`
    line: int


def check(root: Path) -> list[Violation]:
    """All violations in the packages under `root`, ordered by path and line. Packages that are absent are skipped."""
    violations = []
    public = _public_names(root / "kitsune" / "__init__.py")
    for package in ("kitsune", "harness", "models"):
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            if package == "kitsune" and not _has_layer(relative):
                problem = f"{_layer(relative)!r} has no layer: give it a row in tests/layers.py"
                violations.append(Violation(relative, 1, problem))
                continue
            tree = ast.parse(path.read_bytes(), filename=str(relative))
            problems = [(imported.line, _judge(relative, imported, public)) for imported in _imports(tree, relative)]
            if package == "harness":
                problems += _private_attributes(tree, public)
            violations += [Violation(relative, line, problem) for line, problem in problems if problem]
    return sorted(violations, key=lambda violation: (violation.path, violation.line, violation.problem))


def _judge(path: Path, imported: _Import, public: frozenset[str]) -> str | None:
    package = path.parts[0]
    root = imported.target.split(".")[0]
    if root == "tests":
        return f"{package} must not import tests"
    if package == "kitsune":
        return _judge_kitsune(path, imported)
    if package == "models" and root in ("kitsune", "harness"):
        return f"models must not import {root}"
    if package == "harness" and root == "kitsune":
        return _judge_use_of_kitsune(imported, public)
    return None


def _judge_kitsune(path: Path, imported: _Import) -> str | None:
    root, _, rest = imported.target.partition(".")
    if root != "kitsune":
        if root in sys.stdlib_module_names or root in _KITSUNE_REQUIRES:
            return None
        return f"kitsune must not import {root}: it needs only the standard library, torch and, where present, triton"
    if path.parts[1:] == ("__init__.py",):
        return None
    target = rest or imported.name or ""
    layer, target_layer = _layer(path), target.split(".")[0]
    if target_layer not in LAYERS:
        return "import a name of kitsune from the module that defines it, not from the package's face"
    if target_layer == layer:
        return _judge_pass(path, target if rest == "" or imported.name is None else f"{target}.{imported.name}")
    allowed = LAYERS[layer] if layer in _EVERYWHERE else (*_EVERYWHERE, *LAYERS[layer])
    if target_layer not in allowed:
        return f"{layer} must not import {target_layer}; it may import: {', '.join(allowed) or 'nothing'}"
    return None


def _judge_pass(path: Path, target: str) -> str | None:
    """Passes know nothing of each other; `pipeline` and the package's `__init__` put them together."""
    parts = target.split(".")
    if parts[0] != "passes" or path.stem in ("pipeline", "__init__") or len(parts) < 2:
        return None
    return f"pass {path.stem} must not import {'.'.join(parts[:2])}: passes do not import each other"


def _judge_use_of_kitsune(imported: _Import, public: frozenset[str]) -> str | None:
    if imported.target != "kitsune":
        return f"harness must not import {imported.target}: only the names that kitsune exports"
    if imported.name is not None and imported.name not in public:
        return f"harness must not import {imported.name} from kitsune: kitsune does not export it"
    return None


def _private_attributes(tree: ast.Module, public: frozenset[str]) -> list[tuple[int, str | None]]:
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    faces = {alias.asname or alias.name for alias in aliases if alias.name == "kitsune"}
    return [
        (node.lineno, f"harness must not use kitsune.{node.attr}: kitsune does not export it")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in faces
        and node.attr not in public
    ]


def _imports(tree: ast.Module, path: Path) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(path.parts[: -node.level]) if node.level else ""
            target = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                yield _Import(target, alias.name, node.lineno)


def _layer(path: Path) -> str:
    """The row of a file: its name, or that of its outermost package below `kitsune`."""
    return path.parts[1].removesuffix(".py")


def _has_layer(path: Path) -> bool:
    return path.parts[1:] == ("__init__.py",) or _layer(path) in LAYERS


def _public_names(face: Path) -> frozenset[str]:
    """What `kitsune/__init__.py` exports by `from module import Name as Name`, and the module's own attributes."""
    tree = ast.parse(face.read_bytes(), filename=str(face)) if face.exists() else ast.Module([], [])
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return frozenset(alias.name for alias in imports if alias.asname == alias.name) | frozenset(_DUNDERS)


def main() -> int:
    """Prints every violation in this checkout; exit code 1 if there is one."""
    root = Path(__file__).resolve().parent.parent
    violations = check(root)
    for violation in violations:
        print(violation)
    print(f"import layers: {f'{len(violations)} violations' if violations else 'kept'}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
