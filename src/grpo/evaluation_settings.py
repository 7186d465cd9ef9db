"""The settings of a held-out evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse.typing import Path_fr

from grpo.answer_metrics import IntervalSettings
from grpo.answer_readings import STRICT
from grpo.rollouts.sampling import SamplingSettings


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
        reading: how the answer is found in a completion: a name of ``answer_readings``, or the dotted path of a
            function (text) -> answer or None.
        max_unscored_share: the largest share of the answers on which the scorer may have no verdict. They count as
            ``unscored`` and are in no accuracy; above the share the evaluation stops, and keeps the completions.
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
    reading: str = STRICT.read.__name__
    max_unscored_share: float = 0.0
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
        if not 0 <= self.max_unscored_share <= 1:
            raise EvaluationError(
                f"max_unscored_share is {self.max_unscored_share}: choose from 0 (every answer gets a verdict) to 1"
            )
        for k in self.pass_at_k:
            if not 1 <= k <= self.samples_per_problem:
                raise EvaluationError(
                    f"pass_at_k holds {k} with samples_per_problem {self.samples_per_problem}: "
                    "pass@k needs at least k samples a problem, so lower k or raise samples_per_problem"
                )
