"""The tests of a problem, read from its metadata.

| metadata | tests |
|---|---|
| ``tests``: statements with asserts; optional ``setup``: code they need | one each |
| ``test_list``, ``test_setup_code``, ``test_imports`` (MBPP as published) | one each |
| ``test``: code that defines ``check(candidate)``, and ``entry_point`` (HumanEval as published) | one |
| ``stdin_stdout``: list of ``{"stdin": ..., "stdout": ...}`` | one each |

``code_form`` says which part of a completion is the program: ``block`` (the default) or ``continuation``, which
needs ``prompt``, the code that the completion continues.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from grpo.rewards.code_blocks import CodeForm


class BadTests(ValueError):
    """A problem's metadata does not give tests that can be run; a fault of the data, not of a completion."""


@dataclass(frozen=True)
class CallTests:
    """Tests that call functions of the program: ``tests`` in order, each after ``setup``.

    ``functions`` are the names that stand for the program's own.
    """

    setup: str
    tests: tuple[str, ...]
    functions: frozenset[str]


@dataclass(frozen=True)
class ScriptTests:
    """Tests that run the program: standard input and the output expected, in pairs."""

    tests: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CodeProblem:
    """How to find the program in a completion, and what it must pass."""

    tests: CallTests | ScriptTests
    form: CodeForm = "block"
    prompt: str = field(default="", repr=False)


def read_problem(metadata: Mapping[str, Any]) -> CodeProblem | None:
    """The tests in a problem's metadata; None where it names none.

    Raises:
        BadTests: tests that are empty, of a wrong type or no Python; the message names the key.
    """
    tests = _read_tests(metadata)
    if tests is None:
        return None
    form = metadata.get("code_form", "block")
    if form not in get_args(CodeForm):
        raise BadTests(f"metadata.code_form is {form!r:.60}: choose {' or '.join(get_args(CodeForm))}")
    if form == "continuation":
        return CodeProblem(tests, "continuation", _text(metadata, "prompt"))
    return CodeProblem(tests)


def _read_tests(metadata: Mapping[str, Any]) -> CallTests | ScriptTests | None:
    if "stdin_stdout" in metadata:
        return ScriptTests(tuple(map(_pair, _filled(metadata, "stdin_stdout"))))
    if "tests" in metadata:
        return _call_tests(metadata.get("setup", ""), _filled(metadata, "tests"), metadata.get("entry_point"))
    if "test_list" in metadata:
        return _call_tests(_mbpp_setup(metadata), _filled(metadata, "test_list"), metadata.get("entry_point"))
    if "test" in metadata:
        entry_point = _text(metadata, "entry_point")
        test = f"{_text(metadata, 'test')}\n\ncheck({entry_point})\n"
        # The prompt may define helpers that the tests call, beside the head of the function that is asked for.
        return _call_tests(metadata.get("prompt", ""), [test], entry_point)
    return None


def _mbpp_setup(metadata: Mapping[str, Any]) -> str:
    imports, code = metadata.get("test_imports", []), metadata.get("test_setup_code", "")
    if not isinstance(imports, list | tuple) or not all(isinstance(line, str) for line in imports):
        raise BadTests(f"metadata.test_imports is {imports!r:.60}: give a list of texts, or leave it out")
    if not isinstance(code, str):
        raise BadTests(f"metadata.test_setup_code is {code!r:.60}: give a text, or leave it out")
    return "\n".join([*imports, code])


def _call_tests(setup: Any, tests: Sequence[Any], entry_point: Any) -> CallTests:
    texts = [setup, *tests]
    if not all(isinstance(text, str) for text in texts):
        raise BadTests("metadata: the tests and their setup must be text, each a piece of Python")
    named = {entry_point} if isinstance(entry_point, str) else set()
    try:
        defined = _names(setup, ast.Store) | set(dir(builtins))
        functions = set().union(*(_names(test, ast.Load) - _names(test, ast.Store) for test in tests))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTests(f"metadata: a test or its setup is no Python: {error}") from error
    return CallTests(setup, tuple(tests), frozenset((functions - defined) | named))


def _names(code: str, context: type[ast.expr_context]) -> set[str]:
    """The names that ``code`` reads, or those that it binds in whatever way."""
    nodes = list(ast.walk(ast.parse(code)))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    if context is ast.Load:
        return names
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names |= {node.name for node in nodes if isinstance(node, definitions)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return names | {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}


def _filled(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata[key]
    if not isinstance(value, list | tuple) or not value:
        raise BadTests(f"metadata.{key} is {value!r:.60}: give a list with at least one test")
    return value


def _pair(pair: Any) -> tuple[str, str]:
    match pair:
        case {"stdin": str(given), "stdout": str(expected)}:
            return given, expected
    raise BadTests(f"metadata.stdin_stdout holds {pair!r:.60}: give objects with the texts stdin and stdout")


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str) or not value:
        raise BadTests(f"metadata.{key} is {value!r:.60}: these tests need it, as text")
    return value
