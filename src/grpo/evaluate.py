"""Stage: ask a policy the held-out problems, and judge its answers apart from the training reward.

``grpo evaluate --config configs/evaluate.yaml --policy build/policy --name base``. The policy folder is
all it needs of the policy; nothing of how it was trained (group size, reward, rounds) reaches its answers or
their verdicts. The same keys and the same token budget serve every policy, so that two evaluations pair by
problem. The training's reward is asked afterwards, for what it pays and the scorer rejects: its loopholes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonargparse
import torch
import yaml
from jsonargparse.typing import Path_fr

from grpo.answer_metrics import Estimate, IntervalSettings, summarise
from grpo.held_out_answers import TRAINED_ROLE, HeldOutAnswer, answers_parquet, judge, role, unjudged_lines
from grpo.loopholes import (
    LOOPHOLES_FILE,
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
from grpo.rollouts.policies import load_policy, load_tokenizer
from grpo.rollouts.prompt_lengths import refuse_long_prompts, require_places
from grpo.rollouts.prompts import prompt_group
from grpo.rollouts.sampling import Sampler, SamplingSettings
from grpo.run_identity import CONFIG_FILE, file_digest, policy_digest, versions
from grpo.scorers import Scorer, ScorerError, check_scorer, load_scorer, refuse_training_reward
from grpo.whole_files import write_whole

UNJUDGED_FILE = "unjudged.jsonl"


class EvaluationError(ValueError):
    """The evaluation as it is set cannot be made."""


@dataclass(frozen=True)
class EvaluateSettings:
    """What is asked, how, and who judges. Every policy that is compared gets the same.

    Args:
        policy: policy folder.
        name: of the evaluation's files, such as ``base`` or ``trained``.
        problems: held-out problems; those of slices the policy was not trained on are reported apart.
        completions_folder: gets ``<name>/completions.parquet`` and ``<name>/loopholes.jsonl``.
        report_folder: gets ``<name>.json``.
        samples_per_problem: sampled completions of each problem, beside one greedy one.
        pass_at_k: each k of pass@k; at most ``samples_per_problem``.
        max_prompt_tokens: a longer prompt is an error; none is ever cut.
        sampled: how they are drawn; the greedy completion has the same token budget.
        seed: of the sampled completions.
        scorer: dotted path of the judge, (problem, answer) -> Score; an answer is correct where it gives 1.
        rewards: file of the training's reward, relative to the config; it is looked at for loopholes, and no
            other number hangs on it. null: they are not looked for.
        probed_per_slice: how many problems of each slice are probed for loopholes; null: all.
        intervals: how intervals are made.
    """

    policy: Path
    name: str
    problems: Path = Path("build/problems/heldout.jsonl")
    completions_folder: Path = Path("build/evaluation")
    report_folder: Path = Path("report/evaluation")
    samples_per_problem: int = 4
    pass_at_k: tuple[int, ...] = (1, 4)
    max_prompt_tokens: int = 512
    sampled: SamplingSettings = field(default_factory=lambda: SamplingSettings(max_new_tokens=8))
    seed: int = 1
    scorer: str = "grpo.scorers.reasoning_gym_score"
    rewards: Path_fr | None = None
    probed_per_slice: int | None = 20
    intervals: IntervalSettings = field(default_factory=IntervalSettings)

    def __post_init__(self) -> None:
        if not self.name or Path(self.name).name != self.name:
            raise EvaluationError(f"name is {self.name!r}: it names files, so give a plain word such as base")
        if self.samples_per_problem < 1:
            raise EvaluationError(f"samples_per_problem is {self.samples_per_problem}: it must be at least 1")
        if self.sampled.temperature == 0:
            raise EvaluationError("sampled.temperature is 0: greedy completions are made anyway, so sample above 0")
        if self.probed_per_slice is not None and self.probed_per_slice < 1:
            raise EvaluationError(
                f"probed_per_slice is {self.probed_per_slice}: give at least 1, or null for all problems; without "
                "rewards nothing is probed"
            )
        for k in self.pass_at_k:
            if not 1 <= k <= self.samples_per_problem:
                raise EvaluationError(
                    f"pass_at_k holds {k} with samples_per_problem {self.samples_per_problem}: "
                    "pass@k needs at least k samples a problem, so lower k or raise samples_per_problem"
                )


def main(argv: list[str]) -> None:
    """Run the stage from the command line's arguments."""
    settings = jsonargparse.auto_cli(EvaluateSettings, args=argv, as_positional=False, prog="grpo evaluate")
    evaluate(settings)


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Ask, judge and write; give what was written to ``<report_folder>/<name>.json``.

    Raises:
        ValueError: a setting, the problem file, the scorer or the policy folder does not fit; nothing is
            written then. Where the scorer has no verdict on a completion, all of them are left in
            ``<completions_folder>/<name>/unjudged.jsonl``.
    """
    problems = read_problems(settings.problems)
    scorer = load_scorer(settings.scorer)
    refuse_training_reward(settings.scorer, scorer, _resolved_config(settings.policy))
    rewards = {} if settings.rewards is None else held_components(read_rewards(settings.rewards))
    groups = _prompts(problems, settings)
    require_writable(settings.completions_folder / settings.name, "completions_folder")
    require_writable(settings.report_folder, "report_folder")
    check_scorer(settings.scorer, scorer, problems)
    folder = settings.completions_folder / settings.name
    answers = _judged(_complete(groups, settings), scorer, folder / UNJUDGED_FILE)
    tried = find_loopholes(rewards, problems, answers, scorer, settings.probed_per_slice) if rewards else []
    evaluation = {"identity": _identity(settings, problems)} | _metrics(answers, problems, settings)
    evaluation["loopholes"] = loophole_numbers(tried, rewards, settings.intervals) if rewards else None
    write_whole(folder / "completions.parquet", answers_parquet(answers))
    (folder / UNJUDGED_FILE).unlink(missing_ok=True)
    write_whole(folder / LOOPHOLES_FILE, loophole_lines(tried))
    text = json.dumps(evaluation, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(settings.report_folder / f"{settings.name}.json", text.encode())
    if rewards:
        print(f"{settings.name}: {loophole_headline(tried)}")
    print(_headline(settings.name, evaluation))
    return evaluation


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


def _judged(completions: Sequence[tuple[str, Rollout]], scorer: Scorer, aside: Path) -> list[HeldOutAnswer]:
    """The completions, judged; they cost the most time, so they are written aside first."""
    write_whole(aside, unjudged_lines(completions))
    try:
        return judge(completions, scorer)
    except ScorerError as error:
        raise ScorerError(f"{error}; the completions are kept in {aside}") from error


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _key(group: PromptGroup, seed: int) -> RolloutKey:
    return RolloutKey(seed, "evaluation", 0, group.problem.id, group.template_id)


def _metrics(
    answers: Sequence[HeldOutAnswer], problems: Sequence[Problem], settings: EvaluateSettings
) -> dict[str, Any]:
    """``overall``: the slices the policy was trained on, together. ``by_slice``: each alone."""
    by_slice = {}
    for name in sorted({problem.slice for problem in problems}):
        chosen = [problem for problem in problems if problem.slice == name]
        by_slice[name] = {"relation": _relation(chosen[0], problems)} | _summary(answers, chosen, settings)
    trained = [problem for problem in problems if role(problem) == TRAINED_ROLE]
    return {"overall": _summary(answers, trained, settings), "by_slice": by_slice}


def _summary(
    answers: Sequence[HeldOutAnswer], problems: Sequence[Problem], settings: EvaluateSettings
) -> dict[str, Any]:
    ids = {problem.id for problem in problems}
    summary: dict[str, Any] = {"problems": len(ids)}
    for mode, pass_ks in (("greedy", ()), ("sampled", settings.pass_at_k)):
        attempts = [answer.attempt for answer in answers if answer.mode == mode and answer.problem_id in ids]
        estimates = summarise(attempts, settings.intervals, pass_ks)
        summary[mode] = {name: estimate.rounded() for name, estimate in estimates.items()}
    return summary


def _relation(problem: Problem, problems: Sequence[Problem]) -> str:
    """How a slice stands to the training: ``trained_on``, ``other_setting`` of such a task, or ``other_task``."""
    if role(problem) == TRAINED_ROLE:
        return "trained_on"
    trained_tasks = {other.metadata.get("task") for other in problems if role(other) == TRAINED_ROLE}
    return "other_setting" if problem.metadata.get("task") in trained_tasks else "other_task"


def _identity(settings: EvaluateSettings, problems: Sequence[Problem]) -> dict[str, Any]:
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


def _headline(name: str, evaluation: Mapping[str, Any]) -> str:
    overall = evaluation["overall"]
    shares = [f"{mode} {_percent(Estimate(**overall[mode]['accuracy']))}" for mode in ("sampled", "greedy")]
    return f"{name}: correct on {overall['problems']} held-out problems: {', '.join(shares)}"


def _percent(estimate: Estimate) -> str:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "unknown"
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
