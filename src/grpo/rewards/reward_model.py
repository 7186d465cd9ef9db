"""A learned reward: a sequence classifier of transformers, frozen, as a value between 0 and 1."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo.records import Problem, Score
from grpo.rewards.exact_answer import text_end

Tokens = tuple[int, ...]

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_FIELD = re.compile(r"\{(?:question|completion)\}")


class RewardModel:
    """What a sequence classifier says of question and completion, many completions at once.

    One logit becomes a value by the sigmoid, several by the softmax at ``label``. The weights are loaded at the
    first use, once a process, frozen and without dropout; a pickle holds none. Rows are padded on the right
    under an attention mask, so what stands beside a completion changes its value by float noise alone, and
    equal texts of one batch are judged once, so that they tie exactly. Nothing is cut: a text that is too long,
    or holds one of the model's special tokens, or loses a part in the chat template, is unscorable.

    A value of 1 does not mean right: the model has seen no proof, and a policy finds what it overrates. Keep
    the held-out scorer independent of it.

    Args:
        model: folder, or name on the hub.
        template: ``chat``, the tokenizer's own chat template with question and completion as one turn each; or
            a text with ``{question}`` and ``{completion}``, to which the tokenizer adds its special tokens.
        revision: commit of a hub model, 40 hexadecimal digits; a branch would be another model some day.
        label: the class whose probability is the value, by name or index; null for a model with one logit.
        max_tokens: longest text, template included; null: what tokenizer and model allow.
        batch_size: rows a pass; a model whose config names no padding token gets one at a time.
        device: where it runs, such as cpu, cuda or cuda:1.
        dtype: of the weights; below float32 values depend visibly on what else is in the batch.
    """

    # Full marks would be an infinite logit, so gold cannot be asked to get them.
    graded_on_gold = False

    def __init__(
        self,
        model: str,
        template: str,
        revision: str | None = None,
        label: str | int | None = None,
        max_tokens: int | None = None,
        batch_size: int = 8,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        if template != "chat" and sorted(_FIELD.findall(template)) != ["{completion}", "{question}"]:
            raise ValueError(
                f"template is {template!r}: give chat, or a text with {{question}} and {{completion}} once"
            )
        if not Path(model).is_dir() and not _COMMIT.fullmatch(revision or ""):
            raise ValueError(
                f"model is {model!r}, no folder, and revision is {revision!r}: pin a hub model by its commit"
            )
        for name, value in (("max_tokens", max_tokens), ("batch_size", batch_size)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        self.model = model
        self.template = template
        self.revision = revision
        self.label = label
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.device = device
        self.dtype = dtype

    def __call__(self, problem: Problem, completion: str) -> Score:
        return self.score_batch([(problem, completion)])[0]

    def score_batch(self, items: Sequence[tuple[Problem, str]]) -> list[Score]:
        """A score for each problem and completion, in their order."""
        if not items:
            return []
        classifier = load_classifier(self.model, self.revision, self.device, self.dtype)
        label = classifier.label_index(self.label)
        rows = [self._tokens(classifier, problem, completion) for problem, completion in items]
        unlike = sorted({row for row in rows if not isinstance(row, Score)}, key=lambda row: (len(row), row))
        values = dict(zip(unlike, classifier.values(unlike, label, self.batch_size), strict=True))
        return [row if isinstance(row, Score) else _score(values[row], len(row)) for row in rows]

    def _tokens(self, classifier: Classifier, problem: Problem, completion: str) -> Tokens | Score:
        completion = completion[: text_end(completion)].strip()
        if fault := classifier.unreadable(problem.question) or classifier.unreadable(completion):
            return Score.unscorable(fault)
        text = self._rendered(classifier.tokenizer, problem.question, completion)
        if completion not in text:
            return Score.unscorable("the chat template leaves out a part of the completion")
        tokens = classifier.tokenizer(text, add_special_tokens=self.template != "chat", verbose=False).input_ids
        limit = min(self.max_tokens or math.inf, classifier.max_tokens)
        if len(tokens) > limit:
            return Score.unscorable(f"{len(tokens)} tokens with the template, more than the reward model's {limit}")
        return tuple(tokens) or Score.unscorable("no tokens to judge")

    def _rendered(self, tokenizer: PreTrainedTokenizerBase, question: str, completion: str) -> str:
        if self.template != "chat":
            parts = {"{question}": question, "{completion}": completion}
            return _FIELD.sub(lambda field: parts[field[0]], self.template)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": completion}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False))


@dataclass(frozen=True)
class Classifier:
    """A frozen classifier and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def max_tokens(self) -> float:
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return min(self.tokenizer.model_max_length, positions or math.inf)

    def unreadable(self, text: str) -> str:
        """Why ``text`` cannot be given to the model as text; empty where it can."""
        if _HALF_PAIR.search(text):
            return "the text holds half a surrogate pair, which has no encoding"
        mark = next((token for token in self.tokenizer.all_special_tokens if token in text), None)
        return f"the text holds {mark!r}, which the reward model would read as markup" if mark else ""

    def label_index(self, label: str | int | None) -> int | None:
        """The logit that ``label`` names; None where the model has one logit alone.

        Raises:
            ValueError: several logits and no label, a label and one logit, or one that the model does not have.
        """
        names = {int(index): name for index, name in (self.model.config.id2label or {}).items()}
        if label is None and len(names) == 1:
            return None
        index = next((index for index, name in names.items() if label in (index, name)), None)
        if index is None or len(names) == 1:
            raise ValueError(
                f"label is {label!r}, and the reward model has the labels {names}: "
                + ("leave it null" if len(names) == 1 else "name one of them")
            )
        return index

    @torch.inference_mode()
    def values(self, rows: Sequence[Tokens], label: int | None, batch_size: int) -> list[float]:
        """A value for each row; NaN where the model gave no finite logits."""
        pad = self.model.config.pad_token_id
        # Without the id of the padding, a causal classifier could not tell which token is a row's last.
        batch_size = batch_size if pad is not None else 1
        values: list[float] = []
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            logits = self._logits(batch, 0 if pad is None else pad)
            chances = logits.sigmoid()[:, 0] if label is None else logits.softmax(dim=-1)[:, label]
            values += chances.masked_fill(~logits.isfinite().all(dim=-1), math.nan).tolist()
        return values

    def _logits(self, rows: Sequence[Tokens], pad: int) -> torch.Tensor:
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=self.model.device)
        # Right padding by count, not by token: the padding token may stand in a text as well.
        lengths = torch.tensor([[len(row)] for row in rows], device=self.model.device)
        mask = (torch.arange(width, device=self.model.device) < lengths).long()
        logits: torch.Tensor = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits.double()


@cache
def load_classifier(model: str, revision: str | None, device: str, dtype: str) -> Classifier:
    """The classifier on its device, once a process.

    Raises:
        ValueError: the weights lack a part, which transformers would fill with random numbers: most likely the
            head, of a model that was never trained to classify.
    """
    # A folder is what it is: a revision pins what the hub gives under a name.
    options: dict[str, Any] = {} if Path(model).is_dir() else {"revision": revision}
    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    classifier, loading = AutoModelForSequenceClassification.from_pretrained(
        model, dtype=getattr(torch, dtype), output_loading_info=True, **options
    )
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"the reward model {model} has no weights for {', '.join(missing)}: choose a trained classifier"
        )
    return Classifier(classifier.to(device).eval().requires_grad_(False), tokenizer)


def _score(value: float, tokens: int) -> Score:
    if math.isnan(value):
        return Score.unscorable("the reward model's logits are not finite")
    return Score(value, parts={"tokens": tokens})
