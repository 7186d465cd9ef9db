"""Settings as JSON: what a function, an object or a value is, so that two of other settings are told apart."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import Any

# How many work at a time changes nothing that is written, and by default follows the machine.
_NO_SETTING = frozenset({"workers"})
# Said of a check to those that prove it (``grpo.rewards``): they follow from its settings.
_DECLARATIONS = frozenset({"control", "graded_on_gold", "same_judge_as"})


def described(value: Any) -> Any:
    """A setting as JSON, the same in every process.

    A path, an exact number or a pattern by its text, a function or class by its dotted path, a dataclass with the
    values of its fields, any other object by its class and :func:`settings_of` it.
    """
    if isinstance(value, Enum):
        return described(value.value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): described(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted((described(each) for each in value), key=repr)
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, Decimal | Fraction):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {"class_path": dotted(value)} | {
            each.name: described(getattr(value, each.name)) for each in fields(value)
        }
    found = settings_of(value)
    return {"class_path": dotted(value)} | found if found else dotted(value)


def settings_of(checker: object) -> dict[str, Any]:
    """What makes two objects of one class differ; nothing for a function or a class.

    ``init_args``: the arguments of its constructor that it keeps under their names. ``kept``: where it does not keep
    all of them so, whatever else it holds in attributes without an underscore, which is what it made of the others.
    """
    if hasattr(checker, "__qualname__"):
        return {}
    names, holds = _arguments(type(checker)), _attributes(checker)
    arguments = {name: described(holds[name]) for name in names if name in holds}
    kept = {name: described(each) for name, each in holds.items() if name not in names and _is_setting(name, each)}
    found: dict[str, Any] = {"init_args": arguments} if arguments else {}
    return found | ({"kept": kept} if kept and len(arguments) < len(names) else {})


def dotted(named: object) -> str:
    """The dotted path of a function or class; of any other object, that of its class."""
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{named.__module__}.{named.__qualname__}"


def _arguments(kind: type) -> list[str]:
    try:
        names = inspect.signature(kind).parameters
    except (TypeError, ValueError):  # a class written in C
        return []
    return [name for name in names if name not in _NO_SETTING]


def _attributes(checker: object) -> dict[str, Any]:
    """What an object holds, in slots too."""
    slots = [name for kind in type(checker).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    held = {name: getattr(checker, name) for name in slots if hasattr(checker, name)}
    return {name: each for name, each in (held | getattr(checker, "__dict__", {})).items() if name not in _NO_SETTING}


def _names(slots: Any) -> list[str]:
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]


def _is_setting(name: str, value: object) -> bool:
    """Not what is for the object's own use, nor a method of its own that it holds."""
    return (
        not name.startswith("_") and name not in _DECLARATIONS and not isinstance(value, MethodType | BuiltinMethodType)
    )
