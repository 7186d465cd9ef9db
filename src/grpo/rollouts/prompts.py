"""From a problem to the tokens the policy is asked with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo.records import Problem, PromptGroup

TEMPLATE_FILE = "prompt_template.json"


@dataclass(frozen=True)
class PromptTemplate:
    """The fixed text around a question, special tokens written out: what is read here is what is tokenised.

    Args:
        id: the name under which the record knows the template.
        text: holds ``{question}`` once; an end of text, if the model wants one, is part of it.
    """

    id: str
    text: str

    def __post_init__(self) -> None:
        if self.text.count("{question}") != 1:
            raise ValueError(
                f"prompt_template.text is {self.text!r}: it must hold {{question}} exactly once, "
                "at the place where the question goes"
            )
        if not self.id:
            raise ValueError("prompt_template.id is empty: give the template a name, the record keeps it")

    def render(self, question: str) -> str:
        return self.text.replace("{question}", question)

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False)
        (folder / TEMPLATE_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PromptTemplate:
        """Read the template of a policy folder.

        Raises:
            ValueError: the folder has none, or not one of this form.
        """
        path = folder / TEMPLATE_FILE
        if not path.is_file():
            raise ValueError(f"{folder} has no {TEMPLATE_FILE}: make the policy folder with `grpo policy`")
        fields = json.loads(path.read_text(encoding="utf-8"))
        if set(fields) != {"id", "text"}:
            raise ValueError(f"{path} has the fields {sorted(fields)}: it must have id and text")
        return cls(**fields)


def prompt_group(
    template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, problem: Problem, occurrence: int = 0
) -> PromptGroup:
    """Render and tokenise a problem's question.

    Raises:
        ValueError: the question holds one of the tokenizer's special tokens, which would be read as a
            turn of the dialogue and not as text.
    """
    for token in tokenizer.all_special_tokens:
        if token in problem.question:
            raise ValueError(
                f"problem {problem.id}: the question holds the special token {token!r}; "
                "take it out, or it would be read as markup"
            )
    text = template.render(problem.question)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    return PromptGroup(problem, template.id, text, tuple(tokens), occurrence)
