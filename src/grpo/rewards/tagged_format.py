"""A thought and an answer between tags: whether a completion has that form, and the answer for another reward.

The form is strict, because each thing it let through would be learnt: each tag once, spelt as declared, the
thought first, nothing around them. :class:`TaggedFormat` pays the form and :class:`InTags` hands the answer
between the tags to any other reward. Both read by :class:`Tags`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo.records import Problem, Score
from grpo.rewards import BatchReward, Reward, judge_batch
from grpo.rewards.exact_answer import text_end

Rule = Literal[
    "misspelt_tag",
    "doubled_tag",
    "nested_tag",
    "second_block",
    "tags_out_of_order",
    "unclosed_tag",
    "missing_block",
    "text_outside",
    "empty_thought",
    "empty_answer",
]
# Letters and signs by their category, and yet nothing to see: fillers of Hangul, the empty pattern of Braille.
_BLANK_SIGNS = frozenset("\u115f\u1160\u3164\uffa0\u2800")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Tagged:
    """What stands between the tags, or the first rule that the text breaks."""

    thought: str = ""
    answer: str = ""
    broken: Rule | None = None


@dataclass(frozen=True)
class Tags:
    """The two tags and how they are read.

    Args:
        think: name of the tag around the thought.
        answer: name of the tag around the answer.
        thought_begun: the prompt ends with the thought's opening tag, so the completion starts inside it.
    """

    think: str = "think"
    answer: str = "answer"
    thought_begun: bool = False

    def __post_init__(self) -> None:
        for field in ("think", "answer"):
            name = getattr(self, field)
            if not _NAME.fullmatch(name):
                raise ValueError(f"{field} is {name!r}: give the tag's name without brackets, such as {field!r}")
        if self.think.lower() == self.answer.lower():
            raise ValueError(f"think and answer are both {self.think!r}: name two different tags")

    def read(self, completion: str) -> Tagged:
        """Read a completion; trailing white space and end marks are no part of it. Linear in its length."""
        text = completion[: text_end(completion)]
        text = f"<{self.think}>{text}" if self.thought_begun else text
        # Loosely, so that a tag that is only almost one breaks a rule instead of being text.
        almost = rf"<[\s/]*(?:{re.escape(self.think)}|{re.escape(self.answer)})\b[^<>]*>"
        tags = list(re.finditer(almost, text, re.IGNORECASE))
        broken = self._broken([tag[0] for tag in tags])
        if broken is not None:
            return Tagged(broken=broken)
        before, thought, between, answer, after = _pieces(text, tags)
        if (before + between + after).strip():
            return Tagged(broken="text_outside")
        if not any(character.isalnum() and _visible(character) for character in thought):
            return Tagged(broken="empty_thought")
        return Tagged(thought, answer) if any(map(_visible, answer)) else Tagged(broken="empty_answer")

    def _broken(self, tags: Sequence[str]) -> Rule | None:
        exact = {f"<{slash}{name}>": (name, slash) for name in (self.think, self.answer) for slash in ("", "/")}
        opened: str | None = None
        closed: list[str] = []
        for tag in tags:
            if tag not in exact:
                return "misspelt_tag"
            name, slash = exact[tag]
            if not slash:
                if opened is not None or name in closed:
                    return _not_opened(name, opened)
                opened = name
            elif name != opened:
                return "doubled_tag" if name in closed else "tags_out_of_order"
            else:
                closed.append(name)
                opened = None
        if opened is not None:
            return "unclosed_tag"
        if len(closed) < 2:
            return "missing_block"
        return None if closed == [self.think, self.answer] else "tags_out_of_order"


class TaggedFormat:
    """1.0 where the completion is one thought and one answer between tags, else 0.0; the answer is not judged.

    ``parts`` name the first broken rule: a ``misspelt_tag`` (other case, spaces, attributes); a ``doubled_tag``
    (opened or closed twice in a row); a ``nested_tag``; a ``second_block``; ``tags_out_of_order`` (the answer
    first, or closed before opened); an ``unclosed_tag``; a ``missing_block``; ``text_outside``; an
    ``empty_thought`` (without a letter or digit); an ``empty_answer`` (without a visible
    sign). There are no marks for a part of the form: they would be paid for tags alone.

    Args:
        think: name of the tag around the thought.
        answer: name of the tag around the answer.
        thought_begun: the prompt ends with the thought's opening tag, so the completion starts inside it.
    """

    def __init__(self, think: str = "think", answer: str = "answer", thought_begun: bool = False) -> None:
        self.tags = Tags(think, answer, thought_begun)

    def __call__(self, problem: Problem, completion: str) -> Score:
        broken = self.tags.read(completion).broken
        return Score(1.0, parts={"broken": None}) if broken is None else _malformed(broken, 0.0)


class InTags:
    """Another reward, given the answer between the tags alone; without the form there is no answer to give.

    Around a reward that judges in batches it is one too.

    Args:
        check: the reward to give the answer to; any check that a component may name.
        think: name of the tag around the thought.
        answer: name of the tag around the answer.
        thought_begun: the prompt ends with the thought's opening tag, so the completion starts inside it.
        malformed: the value of a completion without the form: 0, or 1 where ``check`` is a penalty, which
            a completion could otherwise escape by leaving out a tag.
    """

    score_batch: Callable[[Sequence[tuple[Problem, str]]], list[Score]]

    def __init__(
        self,
        check: Reward,
        think: str = "think",
        answer: str = "answer",
        thought_begun: bool = False,
        malformed: float = 0.0,
    ) -> None:
        if not 0 <= malformed <= 1:
            raise ValueError(f"malformed is {malformed}: give a value from 0 to 1")
        self.check = check
        self.tags = Tags(think, answer, thought_begun)
        self.malformed = malformed
        # What the self-check asks of the reward inside, it may ask of this one.
        self.graded_on_gold = getattr(check, "graded_on_gold", True)
        self.control = getattr(check, "control", False)
        if isinstance(check, BatchReward):  # only then: having the method is what makes a reward one
            self.score_batch = self._score_batch

    def __call__(self, problem: Problem, completion: str) -> Score:
        tagged = self.tags.read(completion)
        return _malformed(tagged.broken, self.malformed) if tagged.broken else self.check(problem, tagged.answer)

    def _score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        assert isinstance(self.check, BatchReward)
        read = [(problem, self.tags.read(completion)) for problem, completion in items]
        inner = iter(judge_batch(self.check, [(problem, one.answer) for problem, one in read if not one.broken]))
        return [_malformed(one.broken, self.malformed) if one.broken else next(inner) for _, one in read]


def _visible(character: str) -> bool:
    """Whether it can be seen standing alone: a letter, digit, mark of punctuation or symbol."""
    return unicodedata.category(character)[0] in "LNPS" and character not in _BLANK_SIGNS


def _not_opened(name: str, opened: str | None) -> Rule:
    """The rule that an opening tag breaks inside an open block, or after a closed one of its name."""
    if opened is None:
        return "second_block"
    return "doubled_tag" if name == opened else "nested_tag"


def _pieces(text: str, tags: Sequence[re.Match[str]]) -> list[str]:
    """The text around and between ``tags``, each piece without outer white space."""
    starts = [0, *(tag.end() for tag in tags)]
    ends = [*(tag.start() for tag in tags), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _malformed(broken: Rule, value: float) -> Score:
    return Score(value, reason=f"not the tagged form: {broken.replace('_', ' ')}", parts={"broken": broken})
