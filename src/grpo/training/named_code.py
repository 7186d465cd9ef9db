"""The code that a configuration names and that is not the package's own: a run is made of it too."""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import yaml

from grpo.run_identity import file_digest

_DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def named_code(config: str, covered: Sequence[Path]) -> dict[str, str]:
    """A digest of every module that the configuration names a class or a function of, by the module's name.

    Modules of one's own that such a module imports count too, so that an edited helper is another run. A module
    without a source file, an extension say, is told by its package's version.

    Args:
        config: resolved, YAML; all that it names has been imported.
        covered: files and folders that another digest is of.
    """
    named = {name for text in _strings(yaml.safe_load(config)) if (name := _module_named(text)) is not None}
    found = named | set(_own_imports(named))
    return {name: _digest(name) for name in sorted(found) if not _is_below(_source(name), covered)}


def _strings(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for part in node.values():
            yield from _strings(part)
    elif isinstance(node, list):
        for part in node:
            yield from _strings(part)


def _module_named(text: str) -> str | None:
    """The imported module that ``text`` is a path into; None for any other text."""
    if not _DOTTED_PATH.fullmatch(text):
        return None
    parts = text.split(".")
    for end in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:end])
        if name in sys.modules:
            return name if _has(sys.modules[name], ".".join(parts[end:])) else None
    return None


def _has(module: ModuleType, path: str) -> bool:
    try:
        attrgetter(path)(module)
    except AttributeError:
        return False
    return True


def _own_imports(names: Iterable[str]) -> Iterator[str]:
    """The modules that these take something from, and so on, as far as they are neither Python's nor installed."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen or not _is_own(name):
            continue
        seen.add(name)
        yield name
        waiting += [origin for value in vars(sys.modules[name]).values() if (origin := _origin(value)) in sys.modules]


def _origin(value: object) -> str:
    origin = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return origin if isinstance(origin, str) else ""


def _is_own(name: str) -> bool:
    return _source(name) is not None and not _is_below(_source(name), _installed())


@cache
def _installed() -> tuple[Path, ...]:
    """Where Python and what was installed stand."""
    return tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _source(name: str) -> Path | None:
    try:
        source = inspect.getsourcefile(sys.modules[name])
    except TypeError:  # built into Python
        return None
    return None if source is None else Path(source)


def _is_below(path: Path | None, folders: Sequence[Path]) -> bool:
    return path is not None and any(path.is_relative_to(folder) for folder in folders)


def _digest(name: str) -> str:
    source = _source(name)
    if source is not None:
        return file_digest(source)
    package = name.partition(".")[0]
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # Python's own, whose version the run knows anyway
        return package
