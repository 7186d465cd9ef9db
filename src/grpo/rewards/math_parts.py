r"""Answers of several parts: every part is needed and none may be added.

An answer is read into parts (a list or set, a point or interval, a union, a matrix, a ratio) and its parts
are compared by a function given: cheap rules in this process, or a full checker in another. Such a function
answers True, False, or None where it cannot tell; so does the comparison of the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from grpo.rewards.math_text import canonical, closing

_NAME = (
    r"(?:\\text\s*\{(?![^{}]*\bnot\b)[^{}]*\}|(?:m?\\angle ?|\\triangle ?)?[A-Z]{1,4}|[a-z]|[a-zA-Z]{4,}"
    r"|\([a-zA-Z](?:,[a-zA-Z])+\)"
    r"|\\(?:vec|overrightarrow|hat|overline)(?:\{[a-zA-Z]+\}| [a-z])|\\[a-zA-Z]+)(?:_\{[^{}]*\})?'*"
    r"(?:\([a-zA-Z](?:,[a-zA-Z])*\))?"
)
_LABEL = re.compile(rf"({_NAME})(?:=|\\in(?![a-zA-Z]))(?!=)")
_TURNED = re.compile(rf"([^=<>a-zA-Z]+)=({_NAME})")  # 5 = x
_MATRIX = re.compile(r"\\begin\{([pbB]?|small)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\[pm][mp](?![a-zA-Z])")
_RELATION = re.compile(r"=|<|>|\\(?:le|ge|ne|in)(?![a-zA-Z])")
_OPENING, _CLOSING = "([", ")]"


class SameLeaf(Protocol):
    """Whether two single expressions in canonical spelling are the same answer; None: cannot tell."""

    def __call__(self, *, gold: str, answer: str) -> bool | None: ...


@dataclass(frozen=True)
class Parts:
    """What an answer consists of. ``kind`` tells how its items are to be compared; a leaf has no items."""

    kind: str
    text: str
    items: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        return self.kind not in ("list", "union")


def same_answer(*, gold: str, answer: str, same_leaf: SameLeaf) -> bool | None:
    r"""Whether two answers in canonical spelling have the same parts.

    >>> same_answer(gold="1,2", answer=r"\{2,1\}", same_leaf=lambda *, gold, answer: gold == answer)
    True
    """
    if gold == answer:
        return True
    (gold_label, gold_body), (label, body) = split_label(gold), split_label(answer)
    parts, gold_parts = read_parts(body), read_parts(gold_body)
    if gold_label is not None and label is not None and gold_label != label:
        return same_leaf(gold=gold, answer=answer) if parts.kind == gold_parts.kind == "leaf" else False
    # An equation that names nothing is an answer as it stands, and so is then the other: y = 2x beside 2x - y = 0.
    if (gold_label is None and is_equation(gold)) or (label is None and gold_label is not None and is_equation(answer)):
        return same_leaf(gold=gold, answer=answer)
    return _same_parts(gold_parts, parts, same_leaf)


def split_label(text: str) -> tuple[str | None, str]:
    r"""``x=5``, ``x \in [0,1)``, ``n=2,3,4`` and ``f(x)=2x``: the name, and what is named; else None and all.

    >>> split_label("n=2,3"), split_label("2x=6"), split_label("x=1,y=2")
    (('n', '2,3'), (None, '2x=6'), (None, 'x=1,y=2'))
    """
    if turned := _TURNED.fullmatch(text):
        return turned[2], turned[1]
    match = _LABEL.match(text)
    if match is None:
        return None, text
    body = text[match.end() :]
    if _RELATION.search(body):
        items = split_top(body, ",")
        if len(items) == 1 or not all(_names(item, match[1]) for item in items[1:]):
            return (match[1], body) if len(items) == 1 and "=" in body else (None, text)
        body = ",".join(item[len(match[1]) + 1 :] if item.startswith(match[1] + "=") else item for item in items)
        if _RELATION.search(body):
            return None, text
    return match[1], body


def _names(item: str, name: str) -> bool:
    return item.startswith(f"{name}=") or _RELATION.search(item) is None


def is_equation(text: str) -> bool:
    return len(split_top(text, "=")) > 1 and len(split_top(text, ",")) == 1


def is_relation(text: str) -> bool:
    return _RELATION.search(text) is not None


def sides(text: str) -> list[str]:
    r"""What stands around the signs of a relation.

    >>> sides(r"0<x\le1")
    ['0', 'x', '1']
    """
    return [side.strip() for side in _RELATION.split(text)]


def read_parts(text: str) -> Parts:
    r"""The parts of an answer in canonical spelling, without its label.

    >>> read_parts(r"\{1,2\}").items, read_parts("[0,1)").kind, read_parts(r"1\pm x").items
    (('1', '2'), '[)', ('1+x', '1-x'))
    """
    text = r"(-\infty,\infty)" if text in (r"\mathbb{R}", r"\R", r"\Reals") else text
    for reader in (_union, _list, _set, _bracketed, _matrix, _ratio):
        found = reader(text)
        if found is not None:
            return found
    return Parts("leaf", text)


def _union(text: str) -> Parts | None:
    items = split_top(text, r"\cup")
    return Parts("union", text, items) if len(items) > 1 else None


def _list(text: str) -> Parts | None:
    items = split_top(text, ",") if ";" not in text else split_top(text, ";")
    spread = tuple(one for item in items for one in _both_signs(item))
    return Parts("list", text, spread) if len(spread) > 1 else None


def _set(text: str) -> Parts | None:
    if text.startswith(r"\{") and closing(text, 1) == len(text) - 1 and text.endswith(r"\}"):
        inside = text[2:-2].strip()
        # A set described by a condition is one expression; the empty one has a sign of its own.
        if inside and not re.search(r"\\mid|[|:]", inside):
            return _list(inside) or Parts("list", text, (inside,))
    return None


def _bracketed(text: str) -> Parts | None:
    if text[:1] in _OPENING and text[-1:] in _CLOSING and text and closing(text, 0) == len(text) - 1:
        items = split_top(text[1:-1], ",") if ";" not in text else split_top(text[1:-1], ";")
        if len(items) > 1:
            return Parts(text[0] + text[-1], text, items)
    return None


def _matrix(text: str) -> Parts | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2].removesuffix("\\\\")) if row.strip()]
    kind = f"matrix of {','.join(str(len(row)) for row in rows)}"
    return Parts(kind, text, tuple(canonical(cell) for row in rows for cell in row))


def _ratio(text: str) -> Parts | None:
    items = split_top(text, ":")
    return Parts("ratio", text, items) if len(items) > 1 else None


def _both_signs(text: str) -> tuple[str, ...]:
    r"""``1 \pm x`` as two answers; with ``\mp`` beside it the signs go together."""
    if not _PLUS_MINUS.search(text):
        return (text,)
    upper = text.replace(r"\pm", "+").replace(r"\mp", "-")
    lower = text.replace(r"\pm", "-").replace(r"\mp", "+")
    return canonical(upper), canonical(lower)


def split_top(text: str, separator: str) -> tuple[str, ...]:
    """``text`` cut at ``separator`` outside all brackets; stray and empty pieces are dropped."""
    pieces = tuple(piece.strip() for piece in _cut(text, separator))
    return tuple(piece for piece in pieces if piece) or (text,)


def _cut(text: str, separator: str) -> Iterator[str]:
    depth, start, place = 0, 0, 0
    while place < len(text):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0 and text.startswith(separator, place):
            yield text[start:place]
            start = place = place + len(separator)
        else:
            place += 1
    yield text[start:]


def _same_parts(gold: Parts, answer: Parts, same_leaf: SameLeaf) -> bool | None:
    if "leaf" in (gold.kind, answer.kind):
        return _same_beside_leaf(gold, answer, same_leaf)
    if {gold.kind, answer.kind} == {"list", "union"} and _of_relations(gold, answer):
        return _same_in_any_order(gold, answer, same_leaf)  # x < 1 or x > 3
    if gold.kind != answer.kind:
        # Sets may be written as unions; any other two kinds are different answers.
        return same_leaf(gold=gold.text, answer=answer.text) if "union" in (gold.kind, answer.kind) else False
    if len(gold.items) != len(answer.items):
        return same_leaf(gold=gold.text, answer=answer.text) if gold.kind == "union" else False
    if gold.ordered:
        return _all(_same_item(g, a, same_leaf) for g, a in zip(gold.items, answer.items, strict=True))
    return _same_in_any_order(gold, answer, same_leaf)


def _of_relations(*sides: Parts) -> bool:
    return all(is_relation(item) for side in sides if side.kind == "list" for item in side.items)


def _same_beside_leaf(gold: Parts, answer: Parts, same_leaf: SameLeaf) -> bool | None:
    if gold.kind != answer.kind:
        other, leaf = (answer, gold) if gold.kind == "leaf" else (gold, answer)
        if other.kind == "list" and len(other.items) == 1:  # a set of one element
            if _is_set(other.items[0]):  # the set that holds a set is another than the one it holds
                return False
            return same_answer(
                gold=(*gold.items, gold.text)[0], answer=(*answer.items, answer.text)[0], same_leaf=same_leaf
            )
        # An interval may be said as an inequality; a list or a matrix is no single expression.
        if other.kind in ("list", "ratio") or not (
            is_relation(leaf.text) or r"\math" in leaf.text or "\\" in leaf.text
        ):
            return False
        if other.kind.startswith("matrix"):
            return same_leaf(gold=gold.text, answer=answer.text)
    return same_leaf(gold=gold.text, answer=answer.text)


def _is_set(text: str) -> bool:
    return text.startswith((r"\{", r"\emptyset"))


def _same_item(gold: str, answer: str, same_leaf: SameLeaf) -> bool | None:
    if _is_set(gold) != _is_set(answer):
        return False
    return same_answer(gold=gold, answer=answer, same_leaf=same_leaf)


def _same_in_any_order(gold: Parts, answer: Parts, same_leaf: SameLeaf) -> bool | None:
    # Values of differently named unknowns keep their order where the answer leaves the names out.
    names = {split_label(item)[0] for item in gold.items}
    if len(names) > 1 and any(split_label(item)[0] is None for item in answer.items):
        return _all(_same_item(g, a, same_leaf) for g, a in zip(gold.items, answer.items, strict=True))
    left = list(answer.items)
    undecided = False
    for item in gold.items:
        verdicts = [_same_item(item, other, same_leaf) for other in left]
        if True in verdicts:
            del left[verdicts.index(True)]
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def _all(verdicts: Iterator[bool | None]) -> bool | None:
    """False as soon as one is, None where one cannot be told, else True."""
    undecided = False
    for verdict in verdicts:
        if verdict is False:
            return False
        undecided = undecided or verdict is None
    return None if undecided else True
