r"""A process that compares expressions with math-verify and sympy, and may be killed at any moment.

Started by :mod:`grpo.rewards.math_processes` and by nothing else: it imports the libraries once and then
forks a worker for every socket it is sent. Each worker says that it is ready, and then answers one JSON line with
one JSON line. The kernel's own timer ends a worker that takes too long: its default action needs no interpreter, so
nothing that sympy does can outlast it, and whoever asked sees the socket close. When its owner goes, all ends with it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import socket
import sys
from functools import lru_cache
from typing import Any, NoReturn

from grpo.rewards.math_parts import is_equation, same_answer, split_label, split_top
from grpo.rewards.math_rules import decide, measured

MOST_MEMORY = 4 * 2**30
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_DEGREES = re.compile(r"(\d+)\^\{\\circ\}")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")


class UnreadableGold(ValueError):
    """Gold is no expression that the libraries can read: nothing can be compared with it."""


def same_leaf(*, gold: str, answer: str, worked_out: bool = True) -> bool:
    """Whether two expressions in canonical spelling are the same answer, by every means there is.

    Raises:
        UnreadableGold: the rules cannot tell, and gold cannot be parsed.
    """
    verdict = decide(gold=gold, answer=answer, worked_out=worked_out)
    if verdict is not None:
        return verdict
    together = measured(gold, answer)
    if together is not None and together != (gold, answer):
        return same_leaf(gold=together[0], answer=together[1], worked_out=False)
    if not is_equation(gold) and is_equation(answer):
        steps = split_top(split_label(answer)[1], "=")
        return all(same_leaf(gold=gold, answer=step, worked_out=False) for step in steps)
    gold_expression = _parsed(gold)
    if gold_expression is None:
        raise UnreadableGold(f"gold cannot be read as mathematics: {gold[:100]!r}")
    expression = _parsed(answer)
    return expression is not None and _same(gold_expression, expression)


@lru_cache(maxsize=512)  # the members of a group share their gold
def _parsed(text: str) -> Any:
    r"""A sympy object, or None where the text is no mathematics.

    Decimals are read as fractions, so that nothing is rounded, and letters keep their case.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from math_verify.grader import should_treat_as_complex

    exact = _DECIMAL.sub(_as_fraction, _PERCENT.sub(r"\\frac{\1}{100}", text))
    exact = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", exact)
    try:
        return latex2sympy(
            exact,
            # Symbols of the two sides are the same only where they are assumed to be the same.
            is_real=not (should_treat_as_complex(text) or _has_imaginary(text)),
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    # The parser raises bare Exceptions as well as whatever sympy raises on an expression without meaning.
    except Exception:  # noqa: BLE001
        return None


def _has_imaginary(text: str) -> bool:
    return "_{i" not in text and _IMAGINARY.search(text) is not None  # an index is another i


def _as_fraction(decimal: re.Match[str]) -> str:
    return rf"\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


def _same(gold: Any, answer: Any) -> bool:
    """math-verify's verdict, within what it is known to get right.

    Its tolerances make every tiny number equal, and two equations without solution too; both are closed here.
    """
    import sympy
    from math_verify import verify

    if isinstance(gold, sympy.Eq) and isinstance(answer, sympy.Eq) and _multiples(gold, answer):
        return True
    if isinstance(gold, sympy.Eq) and not _solvable(gold):
        return False
    as_sets = _as_sets(gold, answer)
    if as_sets is not None:
        return bool(as_sets[0] == as_sets[1])
    gold, answer = _worked_out(gold), _worked_out(answer)
    polynomials = _same_polynomials(gold, answer)
    if polynomials is not None:
        return polynomials
    same = verify(gold=gold, target=answer, numeric_precision=60, timeout_seconds=None, allow_set_relation_comp=True)
    return bool(same or _same_as_unknown(gold, answer)) and not _differ_in_value(gold, answer)


def _same_polynomials(gold: Any, answer: Any) -> bool | None:
    """What multiplying out tells of two polynomials in some unknown, exactly and at a fraction of the cost."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return None
    unknowns = gold.free_symbols | answer.free_symbols
    if not unknowns or not all(side.is_polynomial(*unknowns) for side in (gold, answer)):
        return None
    difference = sympy.expand(gold - answer)
    rational = all(number.is_Rational for number in difference.as_coefficients_dict(*unknowns).values())
    return bool(difference == 0) if rational else None


def _worked_out(expression: Any) -> Any:
    """Integrals and sums done exactly: with the precision asked for, their numerical values take very long."""
    import sympy

    return expression.doit() if isinstance(expression, sympy.Expr) else expression


def _same_as_unknown(gold: Any, answer: Any) -> bool:
    """A lone unknown against an expression, which math-verify compares by its text alone: x and 2x - x."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    return bool((gold.is_Symbol or answer.is_Symbol) and sympy.simplify(gold - answer) == 0)


def _multiples(gold: Any, answer: Any) -> bool:
    """Whether one equation is the other times a number."""
    import sympy

    try:
        ratio = sympy.simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))
    except (TypeError, AttributeError):
        return False
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero)


def _solvable(equation: Any) -> bool:
    import sympy

    try:
        return bool(sympy.solve(equation))
    except NotImplementedError:
        return True


def _as_sets(gold: Any, answer: Any) -> tuple[Any, Any] | None:
    """Both as sets of real numbers, where both are inequalities or sets in one unknown."""
    import sympy
    from sympy.logic.boolalg import Boolean

    kinds = (sympy.Set, Boolean)
    if not (isinstance(gold, kinds) and isinstance(answer, kinds)) or isinstance(gold, sympy.Eq):
        return None
    unknowns = {symbol for side in (gold, answer) if isinstance(side, Boolean) for symbol in side.free_symbols}
    if len(unknowns) > 1:
        return None
    try:
        return tuple(side.as_set() if isinstance(side, Boolean) else side.simplify() for side in (gold, answer))
    except (NotImplementedError, TypeError, AttributeError, ValueError):
        return None


def _differ_in_value(gold: Any, answer: Any) -> bool:
    """Whether two numbers differ in any digit that can be computed."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    difference = gold - answer
    if difference.free_symbols or not difference.is_number:
        return False
    parts = difference.evalf(2, maxn=2_000).as_real_imag()
    # A part of which no digit could be computed has precision 1: it is zero as far as can be told.
    return any(part.is_Number and part != 0 and getattr(part, "_prec", 2) != 1 for part in parts)


def answer_line(line: str) -> str:
    request = json.loads(line)
    try:
        verdict = same_answer(gold=request["gold"], answer=request["answer"], same_leaf=same_leaf)
    except UnreadableGold as error:
        return json.dumps({"error": str(error)})
    except (MemoryError, RecursionError) as error:
        return json.dumps({"error": f"the checker gave up: {type(error).__name__}"})
    # Declared catch-all: whatever sympy raises on odd input is the checker's failure, and is told as one.
    except Exception as error:  # noqa: BLE001
        return json.dumps({"error": f"the checker failed: {type(error).__name__}: {str(error)[:200]}"})
    return json.dumps({"same": bool(verdict)})


def _work(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with connection.makefile("rw", encoding="utf-8", newline="\n") as lines:
        lines.write('{"ready": true}\n')
        lines.flush()
        for line in lines:
            signal.setitimer(signal.ITIMER_REAL, json.loads(line)["limit_seconds"])
            reply = answer_line(line)
            signal.setitimer(signal.ITIMER_REAL, 0)
            lines.write(reply + "\n")
            lines.flush()
    os._exit(0)


def main(control: socket.socket) -> NoReturn:
    """Fork a worker for each socket that comes over ``control``, until its other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    logging.disable(logging.CRITICAL)
    same_leaf(gold="x^{2}+2x+1=0", answer=r"\frac{1}{2}(x+1)^{2}=0")  # builds the parser's tables before the first fork
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            # The owner is gone or wants no more: whatever its workers are doing, nobody waits for it.
            os.killpg(os.getpgid(0), signal.SIGKILL)
        if os.fork() == 0:
            control.close()
            _work(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


if __name__ == "__main__":
    if os.getpgid(0) != os.getpid():
        sys.exit("math_worker is started by math_processes alone, in a process group of its own")
    main(socket.socket(fileno=0))
