r"""The boxes of a completion, ``\boxed{...}`` and ``\fbox{...}``, and which of them are one answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NESTED_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# What may stand between boxes that together are one answer. Prose between them makes the last one count alone.
_BETWEEN_BOXES = re.compile(r"[\s$,;]*(?:(?:\\text\s*\{)?\s*(?:and|or)\b\s*\}?)?[\s$,;]*")


@dataclass(frozen=True)
class Box:
    """A box: where it stands and what it holds."""

    start: int
    end: int
    content: str | None  # None: never closed


def boxes_in(text: str) -> Iterator[Box]:
    """Outermost boxes in order, found in one pass; a box inside a box becomes a plain group."""
    stack: list[tuple[int, int] | None] = []  # of a box: where it and its content start; None for other braces
    depth = 0
    for token in _BRACE.finditer(text):
        if token[0].endswith("{") and token[0] != r"\{":
            is_box = token[0] != "{"
            stack.append((token.start(), token.end()) if is_box else None)
            depth += is_box
        elif token[0] == "}" and stack:
            opened = stack.pop()
            depth -= opened is not None
            if opened is not None and depth == 0:
                content = _NESTED_BOX.sub("", text[opened[1] : token.start()]).strip()
                yield Box(opened[0], token.end(), content)
    opened = next((box for box in stack if box is not None), None)
    if opened is not None:
        yield Box(opened[0], len(text), None)


def side_by_side(text: str, filled: Sequence[Box]) -> list[Box]:
    """The last box and those before it with nothing but ``and`` or a comma between: answers of several parts."""
    together = [filled[-1]]
    for box in reversed(filled[:-1]):
        if together[0].start - box.end > 30 or not _BETWEEN_BOXES.fullmatch(text, box.end, together[0].start):
            break
        together.insert(0, box)
    return together
