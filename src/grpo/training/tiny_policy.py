"""The tiny policy: a stock architecture with a character tokenizer, made here in seconds."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo.problem_files import read_problems
from grpo.rollouts.prompts import PromptTemplate
from grpo.run_identity import file_digest
from grpo.training.warmstart_module import warmstart

END, UNKNOWN = "<end>", "<unknown>"


def character_tokenizer(words: Iterable[str] = ()) -> PreTrainedTokenizerBase:
    """One token for each printable ASCII character, and one for each of ``words`` wherever it stands."""
    characters = sorted(string.printable)
    vocabulary = {token: i for i, token in enumerate([END, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens(sorted(set(words)))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token=UNKNOWN)


def words_of(text: str) -> list[str]:
    """Words of two letters and more, each with the space before it: as tokens they shorten a question threefold."""
    return re.findall(r" ?[A-Za-z]{2,}", text)


@dataclass(frozen=True)
class TinyPolicy:
    """A Llama of well under a million parameters, warm-started on worked examples.

    Args:
        examples: problem file of worked examples; none of them is a validation or held-out problem.
        layers: transformer blocks.
        width: of the residual stream.
        heads: of attention.
        steps: updates of the warm start.
        rows: examples an update.
        learning_rate: at the start.
        seed: of the weights and of the order of the examples.
    """

    examples: Path = Path("data/worked_examples.jsonl")
    layers: int = 2
    width: int = 64
    heads: int = 4
    steps: int = 400
    rows: int = 16
    learning_rate: float = 4e-3
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"source.{name} is {getattr(self, name)}: it must be at least 1")
        if self.steps < 0:
            raise ValueError(f"source.steps is {self.steps}: it must be at least 0 (random weights)")
        if self.width % (2 * self.heads):  # positions turn pairs of a head's coordinates
            raise ValueError(
                f"source.width is {self.width}, of which each of source.heads = {self.heads} takes an even share: "
                f"make it a multiple of {2 * self.heads}"
            )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"source.learning_rate is {self.learning_rate}: it must be positive and finite")

    def provenance(self) -> Mapping[str, Any]:
        return asdict(self) | {"examples": str(self.examples), "examples_sha256": file_digest(self.examples)}

    def load(self, template: PromptTemplate) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Train it; the same settings give the same weights on one machine."""
        examples = [(template.render(p.question), f" {p.answer}") for p in read_problems(self.examples)]
        tokenizer = character_tokenizer(word for prompt, _ in examples for word in words_of(prompt))
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        model = warmstart(config, tokenizer, examples, self.steps, self.rows, self.learning_rate, self.seed)
        return model, tokenizer
