from pathlib import Path

import pytest
from fixtures_policy import TOKENIZER

from grpo.records import Problem
from grpo.rollouts.prompts import PromptTemplate, prompt_group


def problem(question: str) -> Problem:
    return Problem("p1", question, "4", "sums")


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
