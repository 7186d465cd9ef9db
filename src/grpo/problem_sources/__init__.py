"""Where problems come from: files and data sets of several layouts, each row made a checked ``Problem``.

``problems`` in ``configs/prepare.yaml`` names one of these, or a list of them; ``docs/data.md`` has an
example of each. A fork's own source is a class with a ``read`` like that of :class:`ProblemSource`.
"""

from grpo.problem_sources.code_tasks import MBPP, HumanEval
from grpo.problem_sources.hub_rows import HubRows, SavedRows
from grpo.problem_sources.layout import GivenSplit, Layout, ProblemSource, SourceRow
from grpo.problem_sources.plain import PlainProblems, Sources, as_sources
from grpo.problem_sources.raw_rows import RawRow, RowReader
from grpo.problem_sources.reasoning_gym_tasks import ReasoningGymTasks
from grpo.problem_sources.tables import MappedProblems
from grpo.problem_sources.worked_maths import GSM8K, MATH

__all__ = [
    "GSM8K",
    "MATH",
    "MBPP",
    "GivenSplit",
    "HubRows",
    "HumanEval",
    "Layout",
    "MappedProblems",
    "PlainProblems",
    "ProblemSource",
    "RawRow",
    "ReasoningGymTasks",
    "RowReader",
    "SavedRows",
    "SourceRow",
    "Sources",
    "as_sources",
]
