import pickle
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.records import Problem, Score
from grpo.rewards import BatchReward, RewardComponent, judge_batch
from grpo.rewards.coin_flip import CoinFlip
from grpo.rewards.exact_answer import END_MARKS, exact_answer
from grpo.rewards.self_check import self_check
from grpo.rewards.tagged_format import InTags, TaggedFormat, Tags

PROBLEM = Problem("p", "1 + 1 =", "2", "s")
GOOD = "<think>One and\none is\ntwo.</think>\n<answer>2</answer>"
TAG_PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<Think>",
    "< answer>",
    "a",
    "2",
    " ",
    "\n",
    "<",
    ">",
    *END_MARKS,
]


class Lengths:
    """A reward in batches that gives each text's length."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, problem: Problem, completion: str) -> Score:
        return self.score_batch([(problem, completion)])[0]

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        self.seen += [text for _, text in items]
        return [Score(float(len(text))) for _, text in items]


@pytest.mark.parametrize(
    "completion",
    [
        GOOD,
        f"\n{GOOD}\n ",
        GOOD + "<|im_end|>",
        GOOD + " </s>\n<|endoftext|>",
        "<think>a</think><answer>wrong\nand long</answer>",
        "<think>a < b and <b>bold</b> and <thinking></think><answer>&</answer>",
    ],
)
def test_a_thought_and_an_answer_between_tags_have_the_form(completion: str) -> None:
    score = TaggedFormat()(PROBLEM, completion)
    assert (score.value, score.parts) == (1.0, {"broken": None})


@pytest.mark.parametrize(
    ("completion", "rule"),
    [
        ("", "missing_block"),
        ("2", "missing_block"),
        ("<think>a</think>", "missing_block"),
        ("<answer>2</answer>", "missing_block"),
        ("<think>a</think><answer>2", "unclosed_tag"),
        ("<think>a<answer>2</answer>", "nested_tag"),
        ("<think>a</think><answer>2</think>", "doubled_tag"),
        ("<think><think>a</think></think><answer>2</answer>", "doubled_tag"),
        ("<think>a</think></think><answer>2</answer>", "doubled_tag"),
        ("<think>a</think><answer><answer>2</answer></answer>", "doubled_tag"),
        ("<think>a</think><answer>2</answer></answer>", "doubled_tag"),
        ("<think>a<answer>2</answer></think>", "nested_tag"),
        ("<think>a</think><answer><think>b</think>2</answer>", "nested_tag"),
        ("<think>a</think><answer>1</answer><answer>2</answer>", "second_block"),
        ("<think>a</think><think>b</think><answer>2</answer>", "second_block"),
        ("<think>a</think><answer>2</answer><think>b</think>", "second_block"),
        ("<answer>2</answer><think>a</think>", "tags_out_of_order"),
        ("</think>a<think><answer>2</answer>", "tags_out_of_order"),
        ("a</think><answer>2</answer>", "tags_out_of_order"),
        ("<THINK>a</THINK><answer>2</answer>", "misspelt_tag"),
        ("<think >a</think><answer>2</answer>", "misspelt_tag"),
        ("<think>a</think><answer id='1'>2</answer>", "misspelt_tag"),
        ("<think>a</think>< / answer><answer>2</answer>", "misspelt_tag"),
        ("<think>a</think><answer/><answer>2</answer>", "misspelt_tag"),
        (f"So: {GOOD}", "text_outside"),
        (f"{GOOD} That is it.", "text_outside"),
        ("<think>a</think> so <answer>2</answer>", "text_outside"),
        (f"<|im_end|>{GOOD}", "text_outside"),
        ("<think></think><answer>2</answer>", "empty_thought"),
        ("<think> \n\t</think><answer>2</answer>", "empty_thought"),
        ("<think>...\u200b</think><answer>2</answer>", "empty_thought"),
        ("<think>\u3164</think><answer>2</answer>", "empty_thought"),
        ("<think>a</think><answer> \n</answer>", "empty_answer"),
        ("<think>a</think><answer>\u200b</answer>", "empty_answer"),
        ("<think>a</think><answer>\u2060\xad \ufeff</answer>", "empty_answer"),
        ("<think>a</think><answer>\u0301\u20dd</answer>", "empty_answer"),
        ("<think>a</think><answer>\u2800\u3164\x00\u202e</answer>", "empty_answer"),
    ],
)
def test_each_broken_rule_is_named(completion: str, rule: str) -> None:
    score = TaggedFormat()(PROBLEM, completion)
    assert (score.value, score.parts) == (0.0, {"broken": rule})
    assert score.reason == f"not the tagged form: {rule.replace('_', ' ')}"


def test_the_tags_can_be_named() -> None:
    check = TaggedFormat(think="reasoning", answer="final-answer")
    assert check(PROBLEM, "<reasoning>a</reasoning><final-answer>2</final-answer>").value == 1.0
    assert check(PROBLEM, GOOD).parts == {"broken": "missing_block"}


def test_a_thought_that_the_prompt_began_is_not_opened_again() -> None:
    check = TaggedFormat(thought_begun=True)
    assert check(PROBLEM, "One and one.</think><answer>2</answer>").value == 1.0
    assert check(PROBLEM, GOOD).parts == {"broken": "doubled_tag"}
    assert check(PROBLEM, "</think><answer>2</answer>").parts == {"broken": "empty_thought"}


@pytest.mark.parametrize(
    ("think", "answer", "message"),
    [("<think>", "answer", "without brackets"), ("", "answer", "think is ''"), ("a", "A", "two different tags")],
)
def test_tags_that_could_not_be_read_are_refused(think: str, answer: str, message: str) -> None:
    for make in (TaggedFormat, Tags):
        with pytest.raises(ValueError, match=message):
            make(think, answer)


def test_another_reward_gets_the_answer_alone() -> None:
    check = pickle.loads(pickle.dumps(InTags(exact_answer)))
    assert check(PROBLEM, GOOD) == exact_answer(PROBLEM, "2")
    assert check(PROBLEM, GOOD.replace(">2<", ">\n 2 \n<")).value == 1.0
    assert check(PROBLEM, GOOD.replace(">2<", ">3<")).value == 0.0
    assert check(PROBLEM, "2").parts == {"broken": "missing_block"}


def test_a_penalty_is_not_escaped_by_a_missing_tag() -> None:
    assert InTags(exact_answer)(PROBLEM, "2").value == 0.0
    assert InTags(exact_answer, malformed=1.0)(PROBLEM, "2").value == 1.0
    with pytest.raises(ValueError, match="malformed is 2"):
        InTags(exact_answer, malformed=2.0)


def test_around_a_batch_reward_it_judges_in_batches_what_has_the_form() -> None:
    inner = Lengths()
    check = InTags(inner)
    assert isinstance(check, BatchReward)
    assert not isinstance(InTags(exact_answer), BatchReward)
    texts = ["2", GOOD, "", GOOD.replace(">2<", ">four<")]
    assert [score.value for score in judge_batch(check, [(PROBLEM, text) for text in texts])] == [0.0, 1.0, 0.0, 4.0]
    assert inner.seen == ["2", "four"]


def test_gold_answers_written_in_the_form_pass_the_self_check() -> None:
    problems = [Problem(str(i), f"{i} + 1 =", str(i + 1), "s") for i in range(4)]
    components = {
        "form": RewardComponent(TaggedFormat(), limit_seconds=None),
        "answer": RewardComponent(InTags(exact_answer), limit_seconds=None),
        "control": RewardComponent(InTags(CoinFlip(1)), limit_seconds=None),
    }
    assert self_check(components, problems, answer_template="<think>A thought.</think><answer>{answer}</answer>") == []
    assert self_check(components, problems) != []


def test_it_is_graded_on_gold_as_the_reward_inside_is() -> None:
    plain, control = InTags(exact_answer), InTags(CoinFlip(1))
    assert (plain.graded_on_gold, plain.control) == (True, False)
    assert (control.graded_on_gold, control.control) == (True, True)


@pytest.mark.parametrize("piece", ["<", "<think", "<think>", "< /", "<" + " " * 50, " ", "</answer", "<|im_end|>"])
def test_a_long_text_is_read_at_once(piece: str) -> None:
    start = time.process_time()
    TaggedFormat()(PROBLEM, piece * (200_000 // len(piece)))
    assert time.process_time() - start < 1.0


@given(st.one_of(st.text(), st.lists(st.sampled_from(TAG_PIECES)).map("".join)), st.booleans())
def test_no_text_makes_it_raise_and_the_form_is_unambiguous(completion: str, thought_begun: bool) -> None:
    tags = Tags(thought_begun=thought_begun)
    form = TaggedFormat(thought_begun=thought_begun)(PROBLEM, completion)
    assert form.value == float(tags.read(completion).broken is None)
    assert InTags(exact_answer, thought_begun=thought_begun)(PROBLEM, completion).value in (0.0, 1.0)
    if form.value == 1.0:
        assert [completion.count(f"<{name}>") for name in ("/think", "answer", "/answer")] == [1, 1, 1]


@given(st.lists(st.sampled_from(TAG_PIECES)).map("".join), st.sampled_from(END_MARKS), st.sampled_from(["", " ", "\n"]))
def test_a_trailing_end_mark_changes_nothing(completion: str, mark: str, space: str) -> None:
    assert Tags().read(completion + space + mark) == Tags().read(completion)


@pytest.mark.parametrize("answer", ["2", "?", "\u221e", "e\u0301", "\u200b7", "\U0001f600", "\u00bd"])
def test_what_can_be_seen_is_an_answer(answer: str) -> None:
    assert TaggedFormat()(PROBLEM, f"<think>a</think><answer>{answer}</answer>").value == 1.0
