"""Which part of a completion is its program."""

from __future__ import annotations

import re
from typing import Literal

CodeForm = Literal["block", "continuation"]

# An opening or closing fence of Markdown: its marks, and the language after them. Nothing is given back (`*+`), so
# that a long line is read once.
_FENCE = re.compile(r" {0,3}(`{3,}+)[ \t]*+([^\s`]*+)[^`]*+")
_PYTHON = {"", "python", "python3", "py"}


def program_of(completion: str, form: CodeForm, prompt: str = "") -> str | None:
    """The program in a completion, or None.

    ``block``: the last fenced block marked as Python or not marked at all; blocks of other languages are passed
    over, and a last block that is not closed runs to the end. ``continuation``: the completion goes on where
    ``prompt`` stopped.

    >>> program_of("Try:\\n```py\\nx = 1\\n```\\nor\\n```bash\\nls\\n```", "block")
    'x = 1\\n'
    """
    if form == "continuation":
        return prompt + completion
    blocks = fenced_blocks(completion)
    return next((code for language, code in reversed(blocks) if language.lower() in _PYTHON), None)


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The language and content of each fenced block, in order; linear in the length of the text."""
    blocks: list[tuple[str, str]] = []
    fence, language = "", ""
    lines: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        match = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence and match:
            fence, language, lines = match[1], match[2], []
        elif fence and match and len(match[1]) >= len(fence) and not match[2]:
            blocks.append((language, _joined(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        blocks.append((language, _joined(lines)))
    return blocks


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
