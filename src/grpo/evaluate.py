"""Stage: ask a policy the held-out problems, and judge its answers apart from the training reward.

``grpo evaluate --config configs/evaluate.yaml --policy build/policy --name base``. The policy folder is
all it needs of the policy; nothing of how it was trained (group size, reward, rounds) reaches its answers or
their verdicts. The same keys and the same token budget serve every policy, so that two evaluations pair by
problem. The training's reward is asked afterwards, for what it pays and the scorer rejects: its loopholes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonargparse
import torch
import yaml

from grpo.answer_readings import Reading, load_reading
from grpo.described import settings_of
from grpo.evaluation_numbers import evaluation_headline, evaluation_numbers
from grpo.evaluation_settings import EvaluateSettings, EvaluationError
from grpo.held_out_answers import HeldOutAnswer, answers_parquet, judge, refuse_unscored, unjudged_lines
from grpo.loopholes import (
    LOOPHOLES_FILE,
    Tried,
    find_loopholes,
    held_components,
    loophole_headline,
    loophole_lines,
    loophole_numbers,
    read_rewards,
)
from grpo.output_folders import require_writable
from grpo.problem_files import read_problems
from grpo.records import Problem, PromptGroup, Rollout, RolloutKey
from grpo.rewards import RewardComponent
from grpo.rollouts.policies import load_policy, load_tokenizer
from grpo.rollouts.prompt_lengths import refuse_long_prompts, require_places
from grpo.rollouts.prompts import prompt_group
from grpo.rollouts.sampling import Sampler
from grpo.run_identity import CONFIG_FILE, file_digest, policy_digest, versions
from grpo.scorers import Scorer, ScorerError, check_scorer, load_scorer, refuse_training_reward
from grpo.whole_files import write_whole

UNJUDGED_FILE = "unjudged.jsonl"


def main(argv: list[str]) -> None:
    """Run the stage from the command line's arguments."""
    settings = jsonargparse.auto_cli(EvaluateSettings, args=argv, as_positional=False, prog="grpo evaluate")
    evaluate(settings)


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Ask, judge and write; give what was written to ``<report_folder>/<name>.json``.

    Raises:
        ValueError: a setting, the problem file, the scorer, its reading or the policy folder does not fit; nothing is
            written then. Where the scorer has no verdict on more completions than are allowed, all of them are left
            in ``<completions_folder>/<name>/unjudged.jsonl``.
    """
    problems = read_problems(settings.problems)
    scorer, reading = load_scorer(settings.scorer), load_reading(settings.reading)
    refuse_training_reward(settings.scorer, scorer, _resolved_config(settings.policy))
    rewards = {} if settings.rewards is None else held_components(read_rewards(settings.rewards))
    groups = _prompts(problems, settings)
    require_writable(settings.completions_folder / settings.name, "completions_folder")
    require_writable(settings.report_folder, "report_folder")
    check_scorer(settings.scorer, scorer, problems, reading)
    answers = _judged(_complete(groups, settings), scorer, reading, settings)
    numbers = evaluation_numbers(answers, problems, settings.intervals, settings.pass_at_k, reading.lenient)
    evaluation = {"identity": _identity(settings, problems, scorer, reading)} | numbers
    tried = _loopholes(rewards, problems, answers, scorer, reading, settings) if rewards else []
    evaluation["loopholes"] = loophole_numbers(tried, rewards, settings.intervals) if rewards else None
    _write(settings, answers, tried, evaluation)
    if rewards:
        print(f"{settings.name}: {loophole_headline(tried)}")
    print(evaluation_headline(settings.name, evaluation))
    return evaluation


def _write(
    settings: EvaluateSettings, answers: Sequence[HeldOutAnswer], tried: Sequence[Tried], evaluation: dict[str, Any]
) -> None:
    folder = settings.completions_folder / settings.name
    write_whole(folder / "completions.parquet", answers_parquet(answers))
    (folder / UNJUDGED_FILE).unlink(missing_ok=True)
    write_whole(folder / LOOPHOLES_FILE, loophole_lines(tried))
    text = json.dumps(evaluation, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(settings.report_folder / f"{settings.name}.json", text.encode())


def _prompts(problems: Sequence[Problem], settings: EvaluateSettings) -> list[PromptGroup]:
    """The prompt of every problem, so that what is wrong with one shows before a model is loaded."""
    tokenizer, template = load_tokenizer(settings.policy)
    groups = [prompt_group(template, tokenizer, problem) for problem in problems]
    refuse_long_prompts(groups, settings.max_prompt_tokens, "max_prompt_tokens")
    require_places(groups, settings.sampled.max_new_tokens, settings.policy, "sampled.max_new_tokens")
    return groups


def _complete(groups: Sequence[PromptGroup], settings: EvaluateSettings) -> list[tuple[str, Rollout]]:
    """Every completion with its mode: one greedy and ``samples_per_problem`` sampled for each problem."""
    policy = load_policy(settings.policy)
    model: torch.nn.Module = policy.model
    model.to(_device())
    completions = []
    for mode, sampling, count in (
        ("greedy", replace(settings.sampled, temperature=0.0), 1),
        ("sampled", settings.sampled, settings.samples_per_problem),
    ):
        print(f"{settings.name}: {len(groups) * count} {mode} completions of {len(groups)} problems", flush=True)
        sampler = Sampler(policy.model, policy.tokenizer, policy.end_token_ids, sampling)
        members = sampler.sample(groups, [_key(group, settings.seed) for group in groups], count)
        completions += [(mode, rollout) for group in members for rollout in group]
    return completions


def _judged(
    completions: Sequence[tuple[str, Rollout]], scorer: Scorer, reading: Reading, settings: EvaluateSettings
) -> list[HeldOutAnswer]:
    """The completions, judged; they cost the most time, so they are written aside first."""
    aside = settings.completions_folder / settings.name / UNJUDGED_FILE
    write_whole(aside, unjudged_lines(completions))
    try:
        answers = judge(completions, scorer, reading)
        refuse_unscored(answers, settings.max_unscored_share)
    except ScorerError as error:
        raise ScorerError(f"{error}; the completions are kept in {aside}") from error
    return answers


def _loopholes(
    rewards: Mapping[str, RewardComponent],
    problems: Sequence[Problem],
    answers: Sequence[HeldOutAnswer],
    scorer: Scorer,
    reading: Reading,
    settings: EvaluateSettings,
) -> list[Tried]:
    return find_loopholes(rewards, problems, answers, scorer, settings.probed_per_slice, reading=reading)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _key(group: PromptGroup, seed: int) -> RolloutKey:
    return RolloutKey(seed, "evaluation", 0, group.problem.id, group.template_id)


def _identity(
    settings: EvaluateSettings, problems: Sequence[Problem], scorer: Scorer, reading: Reading
) -> dict[str, Any]:
    """What the numbers depend on. No path and no time: two runs of one policy give the same bytes."""
    sampling = settings.sampled.sampling_policy()
    return {
        "name": settings.name,
        "policy_sha256": policy_digest(settings.policy),
        "problems_sha256": file_digest(settings.problems),
        "problems": len(problems),
        "samples_per_problem": settings.samples_per_problem,
        "pass_at_k": list(settings.pass_at_k),
        **json.loads(sampling.settings),
        "tools": json.loads(sampling.tools),
        "seed": settings.seed,
        "device": _device(),
        "scorer": settings.scorer,
        "scorer_settings": settings_of(scorer),
        "reading": reading.path,
        "rewards_sha256": None if settings.rewards is None else file_digest(Path(settings.rewards)),
        "probed_per_slice": settings.probed_per_slice,
        "intervals": asdict(settings.intervals),
        "versions": versions(),
    }


def _resolved_config(policy: Path) -> object:
    path = policy / CONFIG_FILE
    if not path.is_file():
        return None
    try:
        parsed: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise EvaluationError(f"{path} is damaged ({first}): make the policy again with `dvc repro train`") from error
    if not isinstance(parsed, dict):
        raise EvaluationError(f"{path} holds no settings: make the policy again with `dvc repro train`")
    return parsed
