"""The tiny workload: counting up from a number, by a policy that was shown too many wrong counts.

It answers in the right form and is right about half of the time, which GRPO can raise within some rounds; an answer is
as long as the count.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path

from common.script import say
from grpo.problem_files import write_problems
from grpo.records import Problem, Score
from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.rollouts.prompts import PromptTemplate
from grpo.training.tiny_policy import TinyPolicy

COUNT_UP = "count_up"
QUESTION = "Start at {start} and count {steps} further. Say each number, and the last once more:"
# A character of the vocabulary that no example holds: the warm-started policy never draws it.
NEVER_DRAWN = "\x0b"


def problems_of(part: str) -> list[Problem]:
    """Two thirds of all starts and counts to train on, the rest held out."""
    pairs = [(start, steps) for start in range(10, 80) for steps in range(2, 11)]
    random.Random(0).shuffle(pairs)
    cut = 2 * len(pairs) // 3
    chosen = pairs[:cut] if part == "train" else pairs[cut:]
    return [
        Problem(f"{start}+{steps}", QUESTION.format(start=start, steps=steps), str(start + steps), COUNT_UP)
        for start, steps in chosen
    ]


def answer_of(start: int, steps: int) -> str:
    counted = " ".join(str(start + i) for i in range(1, steps + 1))
    return f"{counted} = {start + steps}"


def counts_right(problem: Problem, completion: str) -> Score:
    """1 where the number behind the last equals sign is the answer."""
    return Score(float(completion.rpartition("=")[2].strip() == problem.answer))


counts_right.graded_on_gold = False  # type: ignore[attr-defined]


def worked_examples() -> list[Problem]:
    """Of the training problems; 60% count one step too few or too many."""
    draw = random.Random(1)
    examples = []
    for problem in problems_of("train"):
        start, steps = map(int, problem.id.split("+"))
        shown = steps + draw.choice((0, 0, -1, 1, 1)) if steps > 2 else steps
        examples.append(Problem(problem.id, problem.question, answer_of(start, shown), COUNT_UP))
    return examples


def make_count_up(folder: Path, fixed_length: bool, steps: int = 400) -> None:
    """Problems and policy, unless they stand there already; without an end token every completion has full length."""
    if (folder / "policy" / "config.json").is_file():
        return
    say("making the tiny policy, once, for a minute or more")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # below it are advertisements
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    write_problems(folder / "problems" / "train.jsonl", problems_of("train"))
    write_problems(folder / "problems" / "validation.jsonl", problems_of("train")[:1])  # asked for, not used
    write_problems(folder / "held_out.jsonl", problems_of("held out"))
    write_problems(folder / "examples.jsonl", worked_examples())
    template = PromptTemplate("bare_question", "{question}")
    source = TinyPolicy(
        folder / "examples.jsonl", layers=4, width=128, heads=4, steps=steps, rows=32, learning_rate=2e-3
    )
    model, tokenizer = source.load(template)
    end = tokenizer(NEVER_DRAWN).input_ids[0] if fixed_length else int(tokenizer.eos_token_id)
    set_end_token(model, tokenizer, end)
    save_policy(folder / "policy", LoadedPolicy(model, tokenizer, template, (end,)), {"made": "for benchmarks"})


def set_end_token(model: object, tokenizer: object, end: int) -> None:
    """The one token that ends a completion, wherever it is read from."""
    model.generation_config.eos_token_id = [end]  # type: ignore[attr-defined]
    model.generation_config.pad_token_id = end  # type: ignore[attr-defined]
    model.generation_config.do_sample = True  # type: ignore[attr-defined]
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(end)  # type: ignore[attr-defined]
