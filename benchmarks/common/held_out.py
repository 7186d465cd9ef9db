"""Judges saved weights on held-out problems: ``python -m common.held_out FOLDER``.

Neither trainer's sampler or reward is used: transformers' ``generate`` draws, and the answer is read here. Answers are
sampled at temperature 1 as in training, with the same random numbers at every look.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.turns import Turns
from grpo.problem_files import read_problems

SAMPLES = 4


def is_right(text: str, answer: str) -> bool:
    """The last number is the answer, and an equals sign stands before it."""
    found = re.search(r"=\s*(\d+)\s*$", text)
    return found is not None and int(found[1]) == int(answer)


@torch.no_grad()
def accuracy(weights: str, policy: Path, held_out: Path, max_new_tokens: int = 48) -> float:
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(weights).eval()
    problems = read_problems(held_out)
    prompts = tokenizer([problem.question for problem in problems], return_tensors="pt", padding=True)
    prompts.pop("token_type_ids", None)
    torch.manual_seed(0)
    drawn = model.generate(
        **prompts,
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        num_return_sequences=SAMPLES,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    texts = tokenizer.batch_decode(drawn[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [problem.answer for problem in problems for _ in range(SAMPLES)]
    return sum(map(is_right, texts, answers)) / len(texts)


def main() -> None:
    turns, folder = Turns(), Path(sys.argv[1])
    while (command := turns.next())["do"] == "judge":
        turns.reply(accuracy=accuracy(command["folder"], folder / "policy", folder / "held_out.jsonl"))


if __name__ == "__main__":
    main()
