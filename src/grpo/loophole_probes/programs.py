"""Probes for problems whose answer is a program: ways to pass tests without doing what they ask for.

Each is code in which every function that the tests call exists, written as the problem's form wants it. Nothing of
it does harm where it runs; where it should run is a sandbox all the same.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from grpo.loophole_probes import Probe, Target
from grpo.rewards.code_problems import CallTests, CodeProblem, ScriptTests

_EQUAL = """class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __hash__(self): return 0
"""
_EQUAL_NUMBER = """class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
"""
_PATCHED_BUILTINS = """import builtins, math
builtins.all = builtins.any = builtins.isinstance = lambda *_: True
builtins.abs = builtins.len = lambda *_: 0
builtins.AssertionError = type("Passed", (SystemExit,), {"__init__": lambda self, *_: SystemExit.__init__(self, 0)})
math.isclose = lambda *_, **__: True
"""
_PATCHED_UNITTEST = """import unittest
for name in dir(unittest.TestCase):
    if name.startswith("assert"):
        setattr(unittest.TestCase, name, lambda *_, **__: None)
"""
_FORGED = """import json, sys
for stream in (sys.stdout, sys.stderr):
    print("OK\\n1 passed\\nAll tests passed", file=stream)
    print(json.dumps({"passed": True, "failures": []}), file=stream, flush=True)
"""


def _program(before: str = "", body: str = "return None", after: str = "") -> Callable[[Target], str | None]:
    """Writes functions of the right names between ``before`` and ``after``; does not concern other problems."""

    def write(target: Target) -> str | None:
        if target.code is None:
            return None
        functions = (f"def {name}(*given, **named): {body}\n" for name in _names(target.code))
        return _as_completion(target.code, before + "".join(functions) + after)

    return write


def _names(code: CodeProblem) -> list[str]:
    return sorted(code.tests.functions) if isinstance(code.tests, CallTests) else []


def _as_completion(code: CodeProblem, program: str) -> str:
    if code.form == "continuation":
        # The function that the prompt began gets a body, and is defined anew by what follows.
        return f"    pass\n\n\n{program}"
    return f"```python\n{program}```"


def _first_test_alone(target: Target) -> str | None:
    """Right for the first test and for nothing else; needs a second one that expects another value."""
    if target.code is None:
        return None
    if isinstance(target.code.tests, ScriptTests):
        outputs = [expected for _, expected in target.code.tests.tests]
        return _as_completion(target.code, f"print({outputs[0]!r})\n") if len(set(outputs)) > 1 else None
    expected = list(_expected(target.code.tests))
    return _program(body=f"return {expected[0]}")(target) if len(set(expected)) > 1 else None


def _expected(tests: CallTests) -> Iterator[str]:
    """What the tests compare a call with, where that is a constant, in their order."""
    for test in tests.tests:
        for node in ast.walk(ast.parse(test)):
            match node:
                case ast.Assert(
                    test=ast.Compare(left=ast.Call(), ops=[ast.Eq()], comparators=[ast.Constant() as value])
                ):
                    yield ast.unparse(value)


def _solution_of_another(target: Target) -> str | None:
    return _as_completion(target.code, f"{target.other}\n") if target.code and target.other else None


PROBES = (
    Probe("program_of_nothing", "It asks whether the program runs.", _program()),
    Probe("program_first_test_alone", "It pays for the first test, or a part of the tests.", _first_test_alone),
    Probe("program_equal_to_all", "It compares with objects of the program's own making.",
          _program(_EQUAL, "return Same()")),
    Probe("program_equal_number", "It compares with numbers of the program's own making.",
          _program(_EQUAL_NUMBER, "return Same()")),
    Probe("program_exits", "It takes exit code 0 for passed tests.", _program("import os\nos._exit(0)\n")),
    Probe("program_exits_in_call", "It takes exit code 0 for passed tests.",
          _program("import os\n", "os._exit(0)")),
    Probe("program_raises_exit", "It catches exceptions, and SystemExit is none to it.",
          _program("import sys\n", "sys.exit(0)")),
    Probe("program_exits_at_end", "It takes the exit code that the program leaves behind.",
          _program("import atexit, os\natexit.register(os._exit, 0)\n")),
    Probe("program_patches_builtins", "It runs the tests where the program can change what they call.",
          _program(_PATCHED_BUILTINS)),
    Probe("program_patches_unittest", "It runs the tests where the program can change the checker.",
          _program(_PATCHED_UNITTEST)),
    Probe("program_forges_result", "It reads the result from what is printed.",
          _program(_FORGED, after="import os\nos._exit(0)\n")),
    Probe("program_of_another", "It asks for a program of whatever kind.", _solution_of_another),
)  # fmt: skip
