"""Values on their way from the solution's interpreter to the judge's: the same plain data, and nothing else."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, deque, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.rewards.code_judge import SolutionError, unpacked
from grpo.rewards.sandbox_guest import answer

LONGEST = 1 << 20

atoms = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
keys = atoms | st.tuples(atoms, atoms) | st.frozensets(atoms, max_size=3)
values = st.recursive(
    keys,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=3), st.sets(keys)
    ),
    max_leaves=8,
)


def sent(value: Any) -> Any:
    return unpacked(answer(lambda: value, LONGEST))


@given(values)
def test_plain_data_arrives_as_it_was(value: Any) -> None:
    arrived = sent(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_special_values() -> None:
    assert math.isnan(sent(float("nan")))
    assert sent(3 - 4j) == 3 - 4j
    for value in (math.inf, -math.inf, 1 << 200, -(1 << 63), "\ud800", bytearray(b"x"), range(3, 9, 2)):
        assert sent(value) == value
    assert list(sent(n * n for n in range(4))) == [0, 1, 4, 9]
    assert next(sent(iter("ab"))) == "a"


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Colour(enum.IntEnum):
    RED = 7


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar(3), 3),
        (Colour.RED, 7),
        (Point(1, 2), (1, 2)),
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(a=1), {"a": 1}),
        ([Liar(3)], [3]),
    ],
)
def test_a_subclass_arrives_as_its_plain_type(value: Any, plain: Any) -> None:
    arrived = sent(value)
    assert arrived == plain
    assert type(arrived) is type(plain)
    assert arrived != 4


@pytest.mark.parametrize("value", [object(), int, len, deque([1]), {"a": object()}, memoryview(b"x"), ...])
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="no plain data"):
        sent(value)


def test_too_much_is_refused() -> None:
    doubled: Any = "x"
    for _ in range(60):
        doubled = [doubled, doubled]
    with pytest.raises(OverflowError, match="too large"):
        sent(doubled)


def failing(error: BaseException) -> bytes:
    def work() -> None:
        raise error

    return answer(work, LONGEST)


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), ZeroDivisionError("z"), AssertionError("a")])
def test_an_exception_arrives_as_its_own_kind(error: Exception) -> None:
    with pytest.raises(type(error)):
        unpacked(failing(error))


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), SolutionError("x")])
def test_what_would_end_the_judge_arrives_as_an_error(error: BaseException) -> None:
    with pytest.raises(SolutionError):
        unpacked(failing(error))


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration()])
def test_what_would_end_a_loop_of_the_tests_arrives_as_an_error(error: Exception) -> None:
    with pytest.raises(SolutionError, match=type(error).__name__):
        all(map(lambda _: unpacked(failing(error)), [2, 4]))  # noqa: C417


@given(st.binary(max_size=200))
def test_no_reply_harms_the_judge(reply: bytes) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - any ordinary one fails the test that asked
        unpacked(b"\xff" + reply)


@pytest.mark.parametrize(
    "reply",
    [
        '["value",["q",1]]', '["value",["d",1]]', '["value",{"a":1}]', '["value"]', '["value",[]]', "1", "[]",
        '["value",["s",["l"]]]', '["value",["n","zz"]]', '["value",["n",7]]', '["value",["b",7]]', '{"value":1}',
        '["value",["r",1.5]]', '["value",["c","a","b"]]', '["error",1,2]', '["error"]', '["error","__import__","os"]',
        '["error","SystemExit","0"]', '["value",' + "[" * 100_000, '["value",' + "9" * 5000 + "]",
        '["value",' + '["l",' * 900 + "1" + "]" * 901,
    ],
)  # fmt: skip
def test_replies_of_another_form_are_errors_of_the_solution(reply: str) -> None:
    with pytest.raises(SolutionError):
        unpacked(reply.encode())
