import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.rewards.final_answers import AnswerStyle, find_answer, gold_answer


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        # boxes: the last counts, whatever stands around it
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{\sqrt{5}}{\frac{3}{4}}}", r"\frac{\sqrt{5}}{\frac{3}{4}}"),
        (r"\boxed{3}. That is wrong, rather \boxed{4}", "4"),
        (r"I write \boxed as asked. So \boxed{8}", "8"),
        (r"We get \boxed{84}., as 7*12. **Result** \boxed{84}", "84"),
        (r"\boxed{6}, since 7 is too large.", "6"),
        (r"\boxed{5}. I have put it into \boxed{}.", "5"),
        (r"\fbox{3}", "3"),
        (r"{ \boxed{5}", "5"),
        (r"a } stray brace \boxed{5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\boxed{5}}", "{5}"),
        (r"\boxed{x=\boxed{5}}", "x={5}"),
        ("\\boxed{5}<|im_end|>\n", "5"),
        (r"<think>\boxed{4}?</think> So \boxed{5}", "5"),
        (r"<think>6*7</think><answer>\boxed{42}</answer>", "42"),
        # boxes side by side are one answer
        (r"\boxed{1} and \boxed{-2}.", "1, -2"),
        (r"$\boxed{1}$, $\boxed{2}$, \text{ and } $\boxed{3}$", "1, 2, 3"),
        (r"\boxed{1} \boxed{1}", "1"),
        # ####
        ("10-4 = 6.\n#### 6", "6"),
        ("#### 41\nOne is missing.\n#### 42", "42"),
        ("#### $1,000.50", "$1,000.50"),
        ("#### 73 #### 72", "72"),
        ("The answer is 4. Or 5.", "4 or 5"),
        ("I don't think it is 5. The answer is 4", "4"),
        ("It is false that 2+2=5. The answer is 4.", "4"),
        ("#### -3/4 ", "-3/4"),
        ("\\boxed{5}\n#### Conclusion", "5"),
        ("\\boxed{5}\n#### 3. Check", "5"),
        ("#### 42\n" + "And so on, and so on. " * 30, "42"),
        # tags
        ("<answer>42</answer>", "42"),
        ("<answer>41</answer> or rather <ANSWER> 42 </ANSWER>", "42"),
        ("<answer>The answer is 42.</answer>", "42"),
        (r"\boxed{41} <answer>42</answer>", "42"),
        # prose
        ("The answer is $1,234.00", "$1,234.00"),
        ("The answer is 42, because 6*7 = 42.", "42"),
        ("The answer is 42. I checked it 3 times.", "42"),
        ("The answer is 5 or 6", "5 or 6"),
        ("**Answer:**\n42", "42"),
        ("**Answer:** 10 − 2√5", "10 − 2√5"),
        ("Answer: B", "B"),
        ("The correct option is (B).", "(B)"),
        ("The final answer is $x=1$ and $x=2$.", "$x=1$ and $x=2$"),
        ("Altogether she pays $29.00.", "$29.00"),
        ("So he packs 72, all told, which fills the van.", "72"),
        ("The share is 28 percent", "28 percent"),
        ("costs between $5 and $6 in total", "$6"),
        ("We find $y = 2x$", "y = 2x"),
        ("So \\[ x = 5\n\\] as was asked.", " x = 5\n"),
        ("between 3-5", "5"),
        ("it falls by -$5.50", "-$5.50"),
        ("it is x2 and then 1/2.", "1/2"),
        # the whole completion
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("2x+4y-3=0", "2x+4y-3=0"),
        (r"\text{no solution}", r"\text{no solution}"),
        ("Evelyn", "Evelyn"),
        ("10 cm", "10 cm"),
        (r"6\times7 = 42", "42"),
    ],
)
def test_the_answer_is_found(completion: str, answer: str) -> None:
    assert find_answer(completion).text == answer


@pytest.mark.parametrize(
    ("completion", "rule"),
    [
        ("", "no answer found"),
        (" \n", "no answer found"),
        ("I do not know what to say here", "no answer found"),
        (r"The answer is \boxed{}", "empty box"),
        (r"\boxed{4} and then \boxed{5", "unclosed box"),
        ("<answer>5", "answer tag without its other half"),
        ("<answer> </answer>", "empty answer tag"),
        (r"<think>It is \boxed{5}", "no answer found"),
        (r"<think>It is \boxed{5}</think>", "no answer found"),
        ("The answer is not 5.", "negated"),
        ("The answer isn't 5.", "negated"),
        (r"It is not \boxed{5}", "negated"),
        ("I don't think the answer is 5", "negated"),
        (r"I do not believe that the answer is \boxed{5}", "negated"),
        ("It is false that the answer is 5", "negated"),
        (r"Anything but \boxed{5}", "negated"),
        ("It is not equal to $5$", "negated"),
        (r"which comes to \frac{1}{2}.", "the last number is a part of an expression"),
        ("and that makes 2^10 for all", "the last number is a part of an expression"),
    ],
)
def test_there_is_no_answer(completion: str, rule: str) -> None:
    found = find_answer(completion)
    assert found.text is None
    assert found.rule == rule


def test_a_negation_elsewhere_does_not_matter() -> None:
    assert find_answer(r"The order does not matter, so \boxed{5}").text == "5"


@pytest.mark.parametrize(
    ("style", "answers"),
    [
        ("any", ["5", "6", "7", "8"]),
        ("boxed", ["5", None, None, None]),
        ("gsm8k_strict", [None, "6", None, None]),
        ("gsm8k_flexible", ["5", "6", "7", "8"]),
    ],
)
def test_the_styles_differ(style: AnswerStyle, answers: list[str | None]) -> None:
    completions = [r"\boxed{5}", "#### 6", "The answer is 7", "so there are 8 of them"]
    assert [find_answer(completion, style).text for completion in completions] == answers


@pytest.mark.parametrize("gold", ["18", " 18\n", "2*9 = 18\n#### 18", r"\boxed{18}", r"So $\boxed{18}$."])
def test_gold_may_be_wrapped(gold: str) -> None:
    assert gold_answer(gold) == "18"


LONG_PIECES = [r"\boxed{", r"\boxed{1}", r"\boxed ", "<answer>", "<think>", "####", "#### 1", "answer", "answer is "]
LONG_PIECES += [
    "answer* ",
    "answer is not\n",
    "don't think that the ",
    "4. Or ",
    "#### 7 ",
    "not ",
    "9",
    "1,",
    "1/",
    "1 ",
    "111x",
    "1,111",
    "a",
    "$",
    "$a ",
    "{",
    "}",
]
LONG_PIECES += [r"\(", " ", "\\", "\n"]


@pytest.mark.parametrize("piece", LONG_PIECES)
def test_long_completions_are_read_at_once(piece: str) -> None:
    start = time.process_time()
    find_answer(piece * (100_000 // len(piece)))
    assert time.process_time() - start < 2.0


PIECES = [
    r"\boxed{",
    "}",
    "{",
    "####",
    " ",
    "5",
    "-",
    ",",
    "$",
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "and",
    "\n",
    ".",
]


@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text())
def test_nothing_makes_it_raise(completion: str) -> None:
    for style in ("any", "boxed", "gsm8k_strict", "gsm8k_flexible"):
        find_answer(completion, style)


@given(st.text(alphabet="abc 123.,=+-*\n"), st.integers())
def test_a_box_at_the_end_always_counts(before: str, number: int) -> None:
    assert find_answer(f"{before}. Hence \\boxed{{{number}}}").text == str(number)
