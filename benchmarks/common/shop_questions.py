"""The SmolLM2 workload: questions about a page of text, to be answered in a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from grpo.records import Problem, Score
from grpo.rollouts.prompts import PromptTemplate

SHOP = "shop"
CHAT = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
# A token of SmolLM2's vocabulary for repositories, which an answer never holds.
NEVER_DRAWN = 4

PAGE = """Read these notes about a shop and answer the question below them in one short sentence.
The shop opens at {opens} in the morning and closes at six in the evening, from Monday to Saturday. On Sundays it stays
closed. A loaf of bread costs {bread} coins, a jar of honey costs {honey} coins and a basket of apples costs 5 coins.
Whoever buys three of the same kind gets one coin off. On Monday the shop sold 12 loaves, 4 jars and 9 baskets; on
Tuesday it sold {loaves} loaves, 2 jars and 11 baskets; on Wednesday, when it rained, it sold only 6 loaves, 1 jar and 3
baskets. The owner, Maria, works with two helpers: Jonas, who bakes the bread at night, and Lena, who drives to the farm
for honey and apples twice a week. In summer they put two tables in front of the door and sell tea; in winter they stay
inside and light the stove. A cake is made to order and must be paid for on the day before.
Question: {question}"""
QUESTIONS = {
    "How many loaves were sold on Tuesday?": "loaves",
    "What does a jar of honey cost?": "honey",
    "When does the shop open?": "opens",
    "What does a loaf of bread cost?": "bread",
}


def shop_problems() -> list[Problem]:
    """Sixteen pages, each with four questions."""
    problems = []
    for page in range(16):
        facts = {
            "opens": ("seven", "eight")[page % 2],
            "bread": 2 + page % 3,
            "honey": 6 + page % 4,
            "loaves": 14 + page,
        }
        for number, (question, fact) in enumerate(QUESTIONS.items()):
            text = PAGE.format(question=question, **facts)
            problems.append(Problem(f"page{page}-{number}", text, str(facts[fact]), SHOP))
    return problems


def names_the_answer(problem: Problem, completion: str) -> Score:
    """Half for the answer among the words, half for few words, so that groups are hardly ever flat."""
    words = completion.replace(".", " ").replace(",", " ").split()
    return Score(0.5 * (problem.answer in words) + 0.5 / max(1, len(words)))


names_the_answer.graded_on_gold = False  # type: ignore[attr-defined]


def make_shop_policy(folder: Path, source: Path, fixed_length: bool) -> None:
    """``source`` with a chat template, its weights linked to; ends at the end of a turn or of a line, or never."""
    if (folder / "config.json").is_file():
        return
    if not (source / "model.safetensors").is_file():
        raise SystemExit(f"{source} holds no policy: make it with `make data` and `dvc repro policy`")
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, folder / path.name)
    PromptTemplate("chat", CHAT).save(folder)
    if fixed_length:
        _never_end(folder)


def _never_end(folder: Path) -> None:
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"eos_token_id": [NEVER_DRAWN]}
    path.write_text(json.dumps(settings), encoding="utf-8")
    token = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    name = next(t["content"] for t in token["added_tokens"] if t["id"] == NEVER_DRAWN)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"eos_token": name}), encoding="utf-8")
