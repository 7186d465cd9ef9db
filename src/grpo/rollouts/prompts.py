"""From a problem to the tokens the policy is asked with."""

from __future__ import annotations

import json
import re
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
        text: holds ``{question}`` once; an end of text, if the model wants one, is part of it. Where it holds
            ``{context}`` too, the text retrieved for the problem goes there.
    """

    id: str
    text: str

    def __post_init__(self) -> None:
        if self.text.count("{question}") != 1:
            raise ValueError(
                f"prompt_template.text is {self.text!r}: it must hold {{question}} exactly once, "
                "at the place where the question goes"
            )
        if self.text.count("{context}") > 1:
            raise ValueError(f"prompt_template.text is {self.text!r}: it may hold {{context}} once, not more often")
        if not self.id:
            raise ValueError("prompt_template.id is empty: give the template a name, the record keeps it")

    @property
    def takes_context(self) -> bool:
        return "{context}" in self.text

    def render(self, question: str, context: str = "") -> str:
        """The prompt. Braces in the question or the context are text, and insert nothing."""
        parts = {"{question}": question, "{context}": context}
        return re.sub(r"\{(?:question|context)\}", lambda found: parts[found.group()], self.text)

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
    """Render and tokenise a problem's question, and its context where the template takes one.

    Raises:
        ValueError: question or context hold one of the tokenizer's special tokens, which would be read as a
            turn of the dialogue and not as text; or the template takes a context and the problem has none.
    """
    for name, text in (("question", problem.question), ("context", problem.context)):
        for token in tokenizer.all_special_tokens:
            if token in text:
                raise ValueError(
                    f"problem {problem.id}: the {name} holds the special token {token!r}; "
                    "take it out, or it would be read as markup"
                )
    if template.takes_context and not problem.context:
        raise ValueError(
            f"problem {problem.id} has no context, and template {template.id!r} has a place for one: "
            "give the problem its context, or choose a template without {context}"
        )
    text = template.render(problem.question, problem.context)
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    return PromptGroup(problem, template.id, text, tuple(tokens), occurrence)
