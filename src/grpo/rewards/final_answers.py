r"""Where a completion says its final answer: boxes, ``####``, answer tags, or the last thing said.

Found from the completion alone, never with a look at gold: a search that knew the right answer would find
it in a list of guesses. Marks (a box, ``####``, a tag) go before prose, and of several the last counts, so an
answer that was taken back does not pay. ``docs/rewards.md`` states the whole policy. All is linear in the
length of the completion.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from grpo.rewards.answer_boxes import boxes_in, side_by_side
from grpo.rewards.exact_answer import END_MARKS

AnswerStyle = Literal["any", "boxed", "gsm8k_strict", "gsm8k_flexible"]

NUMBER = r"[-+\u2212]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:(?<=\d)|\.(?=\d))(?:\.?\d+)?"
_LAST_NUMBER = re.compile(rf"(?<![\w.])(?:\d+/)?{NUMBER}(?:/\d+|\s*(?:\\?%|percent\b))?", re.ASCII)
_HASHES = re.compile(
    rf"####[ \t]*(?=[-+(\\]*{NUMBER})(?!\d+\.\s+[A-Za-z])((?:(?!####)[^\n])*)"
)  # not the heading "#### 3. Check"
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_THOUGHT = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(?:answer|result|solution|option|choice)\b[\s*]*(?:(?:is|are|equals)\b|[:=])[\s*:]*", re.IGNORECASE
)
# A dollar sign opens mathematics only where no space follows, and closes it only where none stands before
# and no digit follows (pandoc's rule): "$5 and $6" are two prices.
_MATHS = re.compile(r"(?<!\\)\$\$?(?=[^\s$])([^$\n]*[^\s$\\])\$\$?(?!\d)|\\[(\[]((?:[^\\]|\\[^()\[\]])*)\\[)\]]")
_WORD = re.compile(r"(?<![\\A-Za-z])(?!(?:and|or)\b)[A-Za-z]{2,}")
_THAT = r"(?:\s+that)?(?:\s+(?:the|my|our|a|an|it|this|final|correct|right|true))*"
_ANSWER = r"(?:\s+(?:answer|result|solution|option|choice))?(?:\s*(?:is|are|was|be|equals?|would\s+be))?"
# What is denied before it is said: "I don't think the answer is", "it is false that it is".
_DENIED = re.compile(
    rf"(?:(?:n['’]t|\bnot|\bnever|\bcannot)\s+(?:think|believe|say|claim|agree|accept|mean|trust){_THAT}"
    rf"|\b(?:doubt|deny|denies|refuse|reject){_THAT}"
    rf"|\b(?:false|untrue|wrong|incorrect|not\s+true|not\s+the\s+case|impossible|unlikely|doubtful)"
    rf"(?=\s+that\b){_THAT}){_ANSWER}[\s$*=:]*$",
    re.IGNORECASE,
)
_MOST_BEFORE = 120
_NEGATED = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot|anything\s+but|other\s+than|instead\s+of|rather\s+than)|n['’]t)(?:\s+(?:be|equals?|equal\s+to|the|a|an|simply|just))*[\s$*=:]*$",
    re.IGNORECASE,
)
# "The answer is 4. Or 5." is one list.
_OR_ELSE = re.compile(r"[.!?]\s+or\s+(?:maybe\s+|perhaps\s+|is\s+it\s+)?(?=[$\\(-]*\.?\d)", re.IGNORECASE)
_CLAUSE_END = re.compile(
    r"[.!?](?=\s|$)|,\s+(?=(?:because|since|as|so|which|where|and\s+(?:I|we|this))\b)|\s+because\b"
)
# A line without prose: mathematics with single letters, and words only in \text, as a name of an environment,
# or as one last word (a unit).
_ALONE = re.compile(
    # Each text is read in one way alone (a command with its braces is never also one without), or reading could take
    # exponentially long.
    r"(?:\\(?:text|begin|end)\s*\{[^{}]*\}|\\(?!(?:text|begin|end)\s*\{[^{}]*\})[A-Za-z]+(?![A-Za-z])"
    r"|\\[^A-Za-z]|[^\\A-Za-z]|(?<![A-Za-z])[A-Za-z](?![A-Za-z]))*"
    r"(?:\b[A-Za-z]{2,}\W*)?"
)
_WORKING = re.compile(r"[^A-Za-z]*=[^A-Za-z]*")  # "6*7 = 42" is a step, of which the last number is the answer
_COMMAND = re.compile(r"\\[A-Za-z]+")
# What stands beside a number that is only a part of an expression: its value is not what the text says.
_PART_BEFORE, _PART_AFTER = frozenset("{^_√*/"), frozenset("}^√\\")
MOST_WORDS = 3
LONGEST_LINE = 200


@dataclass(frozen=True)
class FinalAnswer:
    """An answer's text and the rule that found it; text None: the completion has no readable answer."""

    text: str | None
    rule: str


def find_answer(completion: str, style: AnswerStyle = "any") -> FinalAnswer:
    r"""The final answer of a completion, under one of four styles.

    ``any``: the last mark, else what follows "the answer is", else the last mathematics or number.
    ``boxed``: a box and nothing else. ``gsm8k_strict``: ``####`` and nothing else. ``gsm8k_flexible``: the
    last number.

    >>> find_answer(r"First \boxed{1}, no: \boxed{2}.").text, find_answer("So 72, all told.").text
    ('2', '72')
    """
    text = _after_thought(_without_end_marks(completion))
    for reader in _READERS[style]:
        found = reader(text)
        if found is not None:
            return found
    return FinalAnswer(None, "no answer found")


def gold_answer(gold: str) -> str:
    r"""Gold as it may be written in a data set: bare, after ``####``, boxed, or between dollar signs."""
    for reader in (_boxed, _hashed):
        found = reader(gold)
        if found is not None and found.text is not None:
            return found.text
    return gold.strip()


def _without_end_marks(text: str) -> str:
    end = text.rstrip()
    while (stripped := end.removesuffix(next((mark for mark in END_MARKS if end.endswith(mark)), ""))) != end:
        end = stripped.rstrip()
    return end


def _after_thought(text: str) -> str:
    """What follows the last thought. A thought that never ends has said no answer yet."""
    last = _last(_THOUGHT, text)
    if last is None:
        return text
    return text[last.end() :] if last[1] else ""


def _marked(text: str) -> FinalAnswer | None:
    """The mark that ends last. One that is empty or never closed is an answer that cannot be read."""
    found = [(end, answer) for end, answer in (_last_boxes(text), _last_tag(text), _last_hashes(text)) if answer]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _boxed(text: str) -> FinalAnswer | None:
    return _last_boxes(text)[1]


def _hashed(text: str) -> FinalAnswer | None:
    return _last_hashes(text)[1]


def _last_boxes(text: str) -> tuple[int, FinalAnswer | None]:
    boxes = list(boxes_in(text))
    if not boxes:
        return -1, None
    if boxes[-1].content is None:
        return len(text), FinalAnswer(None, "unclosed box")
    filled = [box for box in boxes if box.content]
    if not filled:
        return boxes[-1].end, FinalAnswer(None, "empty box")
    together = side_by_side(text, filled)
    if _negated(text, together[0].start):
        return filled[-1].end, FinalAnswer(None, "negated")
    contents = dict.fromkeys(box.content for box in together if box.content)
    return filled[-1].end, FinalAnswer(", ".join(contents), "last box" if len(contents) == 1 else "boxes side by side")


def _last_tag(text: str) -> tuple[int, FinalAnswer | None]:
    tags = list(_TAG.finditer(text))
    if not tags:
        return -1, None
    opening = next((i for i in reversed(range(len(tags))) if not tags[i][1]), None)
    if opening is None or opening + 1 == len(tags):
        return tags[-1].end(), FinalAnswer(None, "answer tag without its other half")
    inside = text[tags[opening].end() : tags[opening + 1].start()].strip()
    found = _last_boxes(inside)[1] or _last_hashes(inside)[1] or _said(inside) or FinalAnswer(inside, "answer tag")
    return tags[opening + 1].end(), found if inside else FinalAnswer(None, "empty answer tag")


def _last_hashes(text: str) -> tuple[int, FinalAnswer | None]:
    last = _last(_HASHES, text)
    return (-1, None) if last is None else (last.end(), FinalAnswer(last[1].strip(), "last ####"))


def _said(text: str) -> FinalAnswer | None:
    """What follows the last "the answer is" on its line, if that is an answer and not prose."""
    last = _last(_PHRASE, text)
    if last is None:
        return None
    # Not a part of the pattern, which would hide a second "the answer is" on the same line.
    line = text[last.end() :].partition("\n")[0]
    rest = line[:1000].replace("*", " ").strip() if "**" in last[0] + line else line[:1000].strip()
    rest = _OR_ELSE.sub(" or ", rest)
    cut = _CLAUSE_END.search(rest)
    clause = rest[: cut.start()] if cut else rest
    if re.match(r"not\b", clause, re.IGNORECASE) or _negated(text, last.start()):
        return FinalAnswer(None, "negated")
    if not clause:
        return None
    if len(_WORD.findall(clause)) <= MOST_WORDS:
        return FinalAnswer(clause, "the answer is")
    return _last_maths_or_number(clause)


def _alone(text: str) -> FinalAnswer | None:
    """The whole completion, where it is one short line that holds no prose."""
    line = text.strip()
    if not line or len(line) > LONGEST_LINE or "\n" in line or _MATHS.search(line):
        return None
    said_in_words = len(_WORD.findall(line)) <= MOST_WORDS and not re.search(r"\d", line)
    if not said_in_words and (not _ALONE.fullmatch(line) or _WORKING.fullmatch(_COMMAND.sub("", line))):
        return None
    return FinalAnswer(line, "the whole completion")


def _last_maths_or_number(text: str) -> FinalAnswer | None:
    maths = None
    for match in _MATHS.finditer(text):
        if len(_WORD.findall(match[0])) <= MOST_WORDS:
            maths = match
    number = _last(_LAST_NUMBER, text)
    if maths is None or (number is not None and number.end() > maths.end()):
        return None if number is None else _lone_number(text, number)
    return _unless_negated(text, maths.start(), maths[1] or maths[2] or "", "last mathematics")


def _lone_number(text: str, number: re.Match[str]) -> FinalAnswer:
    before, after = text[number.start() - 1 : number.start()], text[number.end() : number.end() + 1]
    if before in _PART_BEFORE or after in _PART_AFTER:
        return FinalAnswer(None, "the last number is a part of an expression")
    return _unless_negated(text, number.start(), number[0], "last number")


def _flexible(text: str) -> FinalAnswer | None:
    number = _last(_LAST_NUMBER, text)
    return None if number is None else FinalAnswer(number[0], "last number")


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _unless_negated(text: str, start: int, answer: str, rule: str) -> FinalAnswer:
    return FinalAnswer(None, "negated") if _negated(text, start) else FinalAnswer(answer, rule)


def _negated(text: str, start: int) -> bool:
    before = text[max(0, start - _MOST_BEFORE) : start]
    return _NEGATED.search(before[-60:]) is not None or _DENIED.search(before) is not None


_READERS: dict[AnswerStyle, tuple[Callable[[str], FinalAnswer | None], ...]] = {
    "any": (_marked, _said, _alone, _last_maths_or_number),
    "boxed": (_boxed,),
    "gsm8k_strict": (_hashed,),
    "gsm8k_flexible": (_flexible,),
}
