"""How an answer is found in a held-out completion: the strict readings to choose from, and the lenient one beside them.

A reading is a function ``(text) -> answer or None``. It sees the completion alone, never gold, and says nothing of
whether the answer is right: that is the scorer's part. All of it is written apart from the rewards' own search for
answers, so that what a reward's reading lets through by mistake is not counted here.

| name | the answer |
|---|---|
| ``strict_answer`` | the whole completion, where it is one line and nothing but an answer |
| ``last_hash_line`` | what follows ``####`` on the last line that has one |
| ``last_boxed`` | what stands in the last ``\\boxed{...}``, its braces balanced |
| ``answer_block`` | what stands in the one ``<answer>...</answer>`` |
| ``final_code`` | the last fenced block of Python; the whole text where there is no fence |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

# A number anywhere in a text: a minus counts as its sign only where no word or number stands before it.
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)
# The same, or a fraction of whole numbers; asked for only where gold is such a fraction.
_NUMBER_OR_FRACTION = re.compile(rf"{_NUMBER.pattern}(?:/\d+)?", re.ASCII)
_FRACTION = re.compile(r"[-+\u2212]?\d+/\d+", re.ASCII)
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_BOX = re.compile(r"\\boxed\s*+\{")
# A brace, or a backslash with what it escapes: ``\{`` opens nothing.
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
# A line that opens or closes a block of code, with the language that it names.
_FENCE = re.compile(r" {0,3}(```+|~~~+)[ \t]*+([^\s`]*)[^`]*")
_ANSWER_TAGS = ("<answer>", "</answer>")
_PYTHON = frozenset({"", "py", "python", "python3"})


class ReadingError(ValueError):
    """The reading cannot be used."""


@dataclass(frozen=True)
class Reading:
    """A strict reading, and what must be known of it to prove a scorer and to write a report.

    Args:
        path: dotted path of the function; it stands in the evaluation's identity.
        read: finds the answer in a completion; None where there is none.
        template: how an answer is written so that it is read, ``{answer}`` standing for it.
        called: the form in words, as in "answers are read as one line".
        lenient: whether the lenient reading stands beside it. Not for programs: no few words of one are an answer.
    """

    path: str
    read: Callable[[str], str | None]
    template: str = "{answer}"
    called: str = ""
    lenient: bool = True

    def written(self, answer: str) -> str:
        """A completion that holds ``answer`` and nothing else."""
        return self.template.replace("{answer}", answer)

    def read_leniently(self, text: str, gold: str) -> str | None:
        """The second reading's answer; None where there is no such reading."""
        return lenient_answer(text, gold) if self.lenient else None


def strict_answer(text: str) -> str | None:
    """The answer where ``text`` is nothing but an answer: one line, without a closing full stop; else None.

    The form that the shipped reward pays, read by code of its own: what the reward's reading lets through
    by mistake is not counted here.
    """
    lines = text.strip().splitlines()
    answer = lines[0][:-1] if len(lines) == 1 and lines[0].endswith(".") else "".join(lines[:1])
    return answer if len(lines) == 1 and answer and answer == answer.strip() and answer[-1] != "." else None


def last_hash_line(text: str) -> str | None:
    """What follows ``####`` on the last line that has one, without a closing full stop; None where nothing does.

    >>> last_hash_line("2 + 3 = 5\\n#### 5"), last_hash_line("#### 5\\n####"), last_hash_line("5")
    ('5', None, None)
    """
    marked = [line for line in text.splitlines() if "####" in line]
    return strict_answer(marked[-1].rpartition("####")[2]) if marked else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the ``\boxed{...}`` that begins last; None where it is empty or never closed.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{1} \boxed{2"), last_boxed("1")
    ('\\frac{1}{2}', None, None)
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start, depth = boxes[-1].end(), 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return text[start : brace.start()].strip() or None
    return None


def answer_block(text: str) -> str | None:
    """What stands in the one ``<answer>...</answer>``; None where there are several, or a tag without its other.

    >>> answer_block("<think>2+3</think> <answer> 5 </answer>"), answer_block("<answer>5</answer><answer>6</answer>")
    ('5', None)
    """
    before, opened, rest = text.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    if not (opened and closed) or any(tag in part for part in (before, answer, after) for tag in _ANSWER_TAGS):
        return None
    return answer.strip() or None


def final_code(text: str) -> str | None:
    """The last fenced block that is marked as Python or not marked; the whole text where it has no fence at all.

    A last block that is not closed runs to the end. None where that is blank, or all blocks are of other languages.

    >>> final_code("So:\\n```py\\nx = 1\\n```\\nDone."), final_code("    return 1\\n"), final_code("```sh\\nls\\n```")
    ('x = 1\\n', '    return 1\\n', None)
    """
    blocks = _blocks(text)
    of_python = [code for language, code in blocks if language.lower() in _PYTHON]
    code = text if not blocks else of_python[-1] if of_python else ""
    return code if code.strip() else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """The language and the content of each fenced block."""
    found: list[tuple[str, str]] = []
    fence = ""
    for line in text.split("\n"):
        mark = _FENCE.fullmatch(line.rstrip("\r"))
        if not fence:
            if mark:
                fence = mark[1]
                found.append((mark[2], ""))
        elif mark and mark[1].startswith(fence) and not mark[2]:
            fence = ""
        else:
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def lenient_answer(text: str, gold: str) -> str | None:
    """The most likely answer in ``text``, finished or not, whatever stands around it; None if there is none.

    For a number the last one of the first line that has any ("12 + 3 = 15, so ..." gives 15), without
    thousands commas; where gold is a fraction, so may it be. Otherwise the last words of the first line that
    has any, as many as the gold has, without punctuation. It is a second reading beside the strict one: written
    apart, so that a gain in form alone (strict rises, lenient does not) shows as such.
    """
    number = _number_pattern(gold.strip())
    pattern = number or _WORD
    wanted = 1 if number else max(1, len(_WORD.findall(gold)))
    for line in text.splitlines():
        found = pattern.findall(line)
        if found:
            answer = " ".join(found[-wanted:])
            return answer.replace(",", "").replace("\u2212", "-") if number else answer
    return None


def _number_pattern(gold: str) -> re.Pattern[str] | None:
    """How a number such as ``gold`` is found in a text; None where gold is none."""
    if _FRACTION.fullmatch(gold):
        return _NUMBER_OR_FRACTION
    return _NUMBER if _NUMBER.fullmatch(gold) else None


def _shipped(read: Callable[[str], str | None], template: str, called: str, lenient: bool = True) -> Reading:
    return Reading(f"{read.__module__}.{read.__name__}", read, template, called, lenient)


STRICT = _shipped(strict_answer, "{answer}", "one line")
READINGS = {
    reading.read.__name__: reading
    for reading in (
        STRICT,
        _shipped(last_hash_line, "#### {answer}", "what follows #### on the last line that has it"),
        _shipped(last_boxed, r"\boxed{{answer}}", r"what stands in the last \boxed{}"),
        _shipped(answer_block, "<answer>{answer}</answer>", "what stands in the one <answer> block"),
        _shipped(final_code, "{answer}", "the last fenced block of Python, or the whole text without a fence", False),
    )
}


def load_reading(name: str) -> Reading:
    """The reading of a short name, or at the dotted path of a function ``(text) -> answer or None``.

    A function of your own may say by an attribute ``answer_template`` how an answer is written for it, such as
    ``"Answer: {answer}"``, and by ``lenient = False`` that there is no lenient reading beside it.

    Raises:
        ReadingError: there is no such function.
    """
    if name in READINGS:
        return READINGS[name]
    try:
        read = resolve_name(name) if "." in name else None
    except (ValueError, ImportError, AttributeError) as error:
        raise ReadingError(f"reading is {name!r}, which cannot be imported ({error}): {_CHOOSE}") from error
    if not callable(read):
        raise ReadingError(f"reading is {name!r}, which is no function: {_CHOOSE}")
    shipped = next((reading for reading in READINGS.values() if reading.read is read), None)
    template, lenient = getattr(read, "answer_template", "{answer}"), bool(getattr(read, "lenient", True))
    if "{answer}" not in template:
        raise ReadingError(f"reading {name}: answer_template is {template!r:.60}: it must hold {{answer}}")
    return shipped or Reading(name, read, template, f"{name} reads them", lenient)


_CHOOSE = (
    f"choose one of {', '.join(READINGS)}, or give the dotted path of a function that finds the answer in a "
    "completion: (text) -> str or None"
)
