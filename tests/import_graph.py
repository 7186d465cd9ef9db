"""Who imports whom inside ``src/``, read from the syntax trees: nothing is imported, nothing is missed in a branch."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src"


@dataclass(frozen=True)
class ImportGraph:
    """Files by module name, and the names each module imports (as written, made absolute)."""

    files: dict[str, Path]
    names: dict[str, frozenset[str]]

    def module_of(self, name: str) -> str | None:
        """The module that ``name`` lies in: itself, or the module it is an attribute of."""
        while name:
            if name in self.files:
                return name
            name = name.rpartition(".")[0]
        return None

    def internal(self, module: str) -> set[str]:
        """The modules of this source tree that ``module`` imports, without itself."""
        found = {self.module_of(name) for name in self.names[module]}
        return {target for target in found if target is not None and target != module}

    def external(self, module: str) -> set[str]:
        """The top-level packages from elsewhere that ``module`` imports."""
        return {name.partition(".")[0] for name in self.names[module] if self.module_of(name) is None}

    def closure(self, *roots: str) -> set[str]:
        """Every module that runs when ``roots`` are imported; the packages above a module run with it."""
        seen: set[str] = set()
        waiting = list(roots)
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            waiting += self.internal(module)
            parent = module.rpartition(".")[0]
            if parent in self.files:
                waiting.append(parent)
        return seen


def read_imports(source: Path = SOURCE) -> ImportGraph:
    """The graph of every Python file below ``source``."""
    files = {module_name(path.relative_to(source)): path for path in sorted(source.rglob("*.py"))}
    return ImportGraph(files, {module: imported_names(module, path) for module, path in files.items()})


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(module: str, path: Path) -> frozenset[str]:
    """Absolute dotted names of all imports in the file, those inside functions and conditions too."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{origin}.{alias.name}" for alias in node.names}
    return frozenset(names)


def runs_code(path: Path) -> bool:
    """Whether the file does more than carry a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)
