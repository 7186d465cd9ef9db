from pathlib import Path

import pytest
from fixtures_policy import TOKENIZER

from grpo.records import Problem
from grpo.rollouts.prompts import PromptTemplate, prompt_group


def problem(question: str, context: str = "") -> Problem:
    return Problem("p1", question, "4", "sums", context=context)


def test_a_prompt_is_the_template_around_the_question() -> None:
    group = prompt_group(PromptTemplate("qa", "Q: {question}\nA:"), TOKENIZER, problem("2 + 2 ="), occurrence=3)
    assert group.prompt_text == "Q: 2 + 2 =\nA:"
    assert group.template_id == "qa"
    assert group.occurrence == 3
    assert len(group.prompt_tokens) == len(group.prompt_text)  # one token a character, none added
    assert TOKENIZER.decode(group.prompt_tokens) == group.prompt_text


@pytest.mark.parametrize("question", ["{question}", "{answer} {0} %s \\1", "a\nb"])
def test_a_question_is_put_in_as_it_stands(question: str) -> None:
    assert PromptTemplate("t", "<{question}>").render(question) == f"<{question}>"


@pytest.mark.parametrize("text", ["", "no place", "{question} and {question}"])
def test_a_template_has_one_place_for_the_question(text: str) -> None:
    with pytest.raises(ValueError, match=r"prompt_template\.text .* exactly once"):
        PromptTemplate("t", text)


def test_a_context_goes_where_the_template_has_a_place_for_it() -> None:
    template = PromptTemplate("read", "Read: {context}\nQ: {question}\nA:")
    group = prompt_group(template, TOKENIZER, problem("2 + 2 =", "two and two make four"))
    assert group.prompt_text == "Read: two and two make four\nQ: 2 + 2 =\nA:"
    assert TOKENIZER.decode(group.prompt_tokens) == group.prompt_text
    assert group.problem.context == "two and two make four"
    other_way_round = PromptTemplate("t", "{question} ({context})")
    assert other_way_round.render("q", "c") == "q (c)"


def test_a_template_without_a_place_leaves_the_context_out() -> None:
    template = PromptTemplate("plain", "Q: {question}")
    assert not template.takes_context
    with_context, without = (prompt_group(template, TOKENIZER, problem("1 + 1 =", text)) for text in ("a hint", ""))
    assert with_context.prompt_text == without.prompt_text == "Q: 1 + 1 ="
    assert with_context.prompt_tokens == without.prompt_tokens


def test_braces_in_a_question_or_a_context_are_text() -> None:
    template = PromptTemplate("t", "<{context}|{question}>")
    assert template.render("what is {context}?", "see {question} and {0} %s \\1") == (
        "<see {question} and {0} %s \\1|what is {context}?>"
    )


def test_a_template_has_at_most_one_place_for_the_context() -> None:
    with pytest.raises(ValueError, match=r"may hold \{context\} once, not more often"):
        PromptTemplate("t", "{context} {question} {context}")


def test_a_problem_without_the_context_that_the_template_takes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problem p1 has no context, and template 'read' has a place for one"):
        prompt_group(PromptTemplate("read", "{context}{question}"), TOKENIZER, problem("1 + 1 ="))


@pytest.mark.parametrize("text", ["{context}{question}", "{question}"])
def test_a_special_token_in_a_context_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="problem p1: the context holds the special token '<end>'"):
        prompt_group(PromptTemplate("t", text), TOKENIZER, problem("1 + 1 =", "it ends here <end> or not"))


def test_a_template_has_a_name() -> None:
    with pytest.raises(ValueError, match=r"prompt_template\.id is empty"):
        PromptTemplate("", "{question}")


def test_a_special_token_in_a_question_is_refused() -> None:
    with pytest.raises(ValueError, match="problem p1: the question holds the special token '<end>'"):
        prompt_group(PromptTemplate("t", "{question}"), TOKENIZER, problem("what is <end> ?"))
    # in the template it is meant
    group = prompt_group(PromptTemplate("t", "<end>{question}"), TOKENIZER, problem("1"))
    assert group.prompt_tokens[0] == TOKENIZER.eos_token_id


def test_a_template_comes_back_from_its_file(tmp_path: Path) -> None:
    template = PromptTemplate("größer", "„{question}“\n")
    template.save(tmp_path)
    assert PromptTemplate.load(tmp_path) == template


def test_a_template_file_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no prompt_template\.json: .* `grpo policy`"):
        PromptTemplate.load(tmp_path)
    (tmp_path / "prompt_template.json").write_text('{"id": "t", "text": "{question}", "stop": "."}')
    with pytest.raises(ValueError, match=r"has the fields \['id', 'stop', 'text'\]"):
        PromptTemplate.load(tmp_path)
