"""The tests of a programming problem, from its metadata under the names that they are published under.

| metadata | tests |
|---|---|
| ``test`` that defines ``check(candidate)``, ``entry_point``; optional ``prompt`` (HumanEval) | one |
| ``test_list``; optional ``test_setup_code``, ``test_imports`` (MBPP) | one each |
| ``tests``; optional ``setup`` | one each |
| ``stdin_stdout``: objects with ``stdin`` and ``stdout`` | one each |
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class UnusableTests(ValueError):
    """The metadata gives no tests that can be run; a fault of the data, not of an answer."""


@dataclass(frozen=True)
class PublishedTests:
    """What judges a program.

    Args:
        setup: code that the tests need, run before them and apart from the program.
        tests: pieces of Python that raise where the program is wrong.
        functions: names that stand for the program's functions, whatever ``setup`` has under them.
        runs: standard input and the output expected, instead of ``tests``.
        before: the beginning of the program, where an answer goes on with it.
    """

    setup: str = ""
    tests: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    runs: tuple[tuple[str, str], ...] = ()
    before: str = ""


def published_tests(metadata: Mapping[str, Any]) -> PublishedTests:
    """The tests in a problem's metadata.

    Raises:
        UnusableTests: there are none, or not of the form above; the message names the key.
    """
    form = metadata.get("code_form", "block")
    if form not in ("block", "continuation"):
        raise UnusableTests(f"metadata.code_form is {form!r:.60}: give block or continuation")
    before = _text(metadata, "prompt") if form == "continuation" else ""
    if "stdin_stdout" in metadata:
        return PublishedTests(runs=tuple(map(_run, _listed(metadata, "stdin_stdout"))), before=before)
    for key, setup in (("tests", ("setup",)), ("test_list", ("test_imports", "test_setup_code"))):
        if key in metadata:
            lines = [line for name in setup for line in _optional_lines(metadata, name)]
            return PublishedTests("\n".join(lines), tuple(_listed_texts(metadata, key)), before=before)
    entry_point = _text(metadata, "entry_point")
    test = f"{_text(metadata, 'test')}\n\ncheck({entry_point})\n"
    return PublishedTests(_helpers(metadata.get("prompt")), (test,), (entry_point,), before=before)


def _helpers(prompt: Any) -> str:
    """The prompt as code, which may define what the tests call beside the head of the function that is asked for.

    A head without as much as a docstring below it is no code by itself, and defines nothing.
    """
    try:
        ast.parse(prompt)
    except (TypeError, SyntaxError, ValueError):
        return ""
    return str(prompt)


def _text(metadata: Mapping[str, Any], key: str) -> str:
    text = metadata.get(key)
    if not isinstance(text, str) or not text:
        raise UnusableTests(f"metadata.{key} is {text!r:.60}: a program is judged by tests, so give it as text")
    return text


def _listed(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    given = metadata[key]
    if not isinstance(given, list | tuple) or not given:
        raise UnusableTests(f"metadata.{key} is {given!r:.60}: give a list with at least one test")
    return given


def _listed_texts(metadata: Mapping[str, Any], key: str) -> list[str]:
    given = _listed(metadata, key)
    if not all(isinstance(each, str) for each in given):
        raise UnusableTests(f"metadata.{key} holds what is no text: give pieces of Python")
    return list(given)


def _optional_lines(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A text, or a list of lines of code; nothing where the key is not there."""
    given = metadata.get(key) or []
    lines = [given] if isinstance(given, str) else given
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise UnusableTests(f"metadata.{key} is {given!r:.60}: give code as text")
    return list(lines)


def _run(pair: Any) -> tuple[str, str]:
    match pair:
        case {"stdin": str(given), "stdout": str(expected)}:
            return given, expected
    raise UnusableTests(f"metadata.stdin_stdout holds {pair!r:.60}: give objects with the texts stdin and stdout")
