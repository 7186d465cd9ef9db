"""Tools that a completion may call: what a tool is, how a call is written, and the calculator that ships.

A call stands in the text that the policy draws, ``<<calculator: 12 + 7>>``; the tool's answer is put behind
it and the policy goes on. A tool is a pure function of its argument and carries a version, so that a record
of the calls can be checked by running them again.
"""

from __future__ import annotations

import ast
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context
from fractions import Fraction

from grpo.records import ToolCall

RESULT = "{result}"

# The text of an error is put into the completion, whose room it takes.
LONGEST_ERROR = 80


class ToolError(ValueError):
    """The argument is not one that the tool can answer; the message is put into the completion."""


class Tool(ABC):
    """A tool: the same argument gives the same text, on every machine and at every time.

    ``version`` is recorded with every rollout: change it whenever any answer changes.
    """

    version: str

    @abstractmethod
    def __call__(self, argument: str) -> str:
        """The answer to ``argument``, short.

        Raises:
            ToolError: no answer can be given.
        """


@dataclass(frozen=True)
class ToolSettings:
    """Which tools a completion may call, and how. Inserted tokens count in max_new_tokens.

    Args:
        available: the tools by the name they are called by; each the class_path and init_args of a Tool.
        opening: begins a call, ``<<calculator: 12 + 7>>``; it must be drawn by the policy, as the whole call.
        closing: ends a call.
        result: what is put behind a call, {result} being the tool's answer. Special tokens in it are spelled
            out as plain text, and no text in it is read as a call or as an end.
        max_calls: calls a completion may make, failed ones included; one more ends it (tool_limit).
    """

    available: dict[str, Tool]
    opening: str = "<<"
    closing: str = ">>"
    result: str = " {result}"
    max_calls: int = 4

    def __post_init__(self) -> None:
        if not self.available:
            raise ValueError("sampling.tools.available is empty: name at least one tool, or set sampling.tools to null")
        for marker in ("opening", "closing"):
            text = getattr(self, marker)
            if not text or text != text.strip():
                raise ValueError(f"sampling.tools.{marker} is {text!r}: give text without blanks around it")
        if self.result.count(RESULT) != 1:
            raise ValueError(f"sampling.tools.result is {self.result!r}: it must hold {RESULT} exactly once")
        if self.max_calls < 1:
            raise ValueError(f"sampling.tools.max_calls is {self.max_calls}: it must be at least 1")
        for name, tool in self.available.items():
            self._check_tool(name, tool)

    def _check_tool(self, name: str, tool: Tool) -> None:
        if not name or name != name.strip() or any(mark in name for mark in (":", self.opening, self.closing)):
            raise ValueError(
                f"sampling.tools.available holds the name {name!r}: a call is written "
                f"{self.opening}name: argument{self.closing}, so choose a name without blanks around it or these marks"
            )
        version = getattr(tool, "version", None)
        if not isinstance(version, str) or not version:
            raise ValueError(
                f"sampling.tools.available.{name} has the version {version!r}: give the tool's class a version, text"
            )

    def versions(self) -> dict[str, str]:
        """The tools' versions by name."""
        return {name: tool.version for name, tool in self.available.items()}

    def rules(self) -> dict[str, str | int]:
        """How a call is written and answered, and how many a completion may make."""
        return {
            "opening": self.opening,
            "closing": self.closing,
            "result": self.result,
            "max_calls": self.max_calls,
        }

    def find_call(self, text: str) -> str | None:
        """What stands between the first opening in ``text`` and the next closing; None without both."""
        found = re.search(f"{re.escape(self.opening)}(.*?){re.escape(self.closing)}", text, re.DOTALL)
        return None if found is None else found[1]

    def text_behind(self, call: ToolCall) -> str:
        """What is put behind an answered call."""
        return self.result.replace(RESULT, call.result)


def answer_call(call: str, tools: Mapping[str, Tool]) -> ToolCall:
    """Run ``name: argument``; whatever is wrong with it becomes a short error text in place of the result.

    A call without a colon is recorded under the empty name.
    """
    name, colon, argument = (part.strip() for part in call.partition(":"))
    if not colon:
        return _failed("", name, "no tool named")
    if name not in tools:
        return _failed(name, argument, "unknown tool")
    try:
        result: object = tools[name](argument)
    except ToolError as error:
        return _failed(name, argument, str(error))
    # Declared catch-all, as for rewards: a bug that one odd argument reaches must not end a long run. Only the
    # exception's type goes in: its message may hold what differs from run to run.
    except Exception as error:  # noqa: BLE001
        return _failed(name, argument, type(error).__name__)
    if not isinstance(result, str):
        return _failed(name, argument, f"the tool gave no text but {type(result).__name__}")
    return ToolCall(name, argument, result)


def _failed(name: str, argument: str, why: str) -> ToolCall:
    return ToolCall(name, argument, f"error: {why}"[:LONGEST_ERROR], valid=False)


_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator(Tool):
    """Arithmetic in exact fractions: ``+ - * / // % **``, signs and parentheses, with Python's precedence.

    A whole result is given in full, another with ten significant digits more than its whole part has,
    rounded half to even: ``10 / 4`` is ``2.5``, ``4 / 2`` is ``2``, ``0.1 + 0.2`` is ``0.3``. A number
    with a decimal point is read to 17 digits.
    """

    version = "1"
    longest = 100
    """Characters of an expression."""
    largest = 512
    """Bits of the numerator and of the denominator of every number on the way."""

    def __call__(self, argument: str) -> str:
        """The value as a decimal number.

        Raises:
            ToolError: not arithmetic, too long, a number too large, a division by zero, a power that is no
                whole number.
        """
        if len(argument) > self.longest:
            raise ToolError(f"longer than {self.longest} characters")
        if not re.fullmatch(r"[0-9.+\-*/%() ]+", argument):
            raise ToolError("not arithmetic")
        try:
            expression = ast.parse(argument.strip(), mode="eval").body
        except SyntaxError:
            raise ToolError("not arithmetic") from None
        try:
            return _decimal(self._value(expression))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None

    def _value(self, node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float() as number):
                value = Fraction(repr(number))  # of 0.1 the digits, not the binary number near it
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
                value = self._value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                value = self._power(self._value(left), self._value(right))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
                value = Fraction(_OPERATIONS[type(op)](self._value(left), self._value(right)))
            case _:
                raise ToolError("not arithmetic")
        if _bits(value) > self.largest:
            raise ToolError("too large")
        return value

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ToolError("a power must be a whole number")
        if (_bits(base) - 1) * abs(exponent) > self.largest:  # seen before the number is made
            raise ToolError("too large")
        return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _decimal(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    whole = str(abs(value.numerator) // value.denominator)
    rounded = Context(prec=len(whole) + 10, rounding=ROUND_HALF_EVEN).divide(value.numerator, value.denominator)
    text = f"{rounded:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
