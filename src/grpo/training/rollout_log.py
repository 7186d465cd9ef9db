"""The record: one table of what was drawn, one of what was decided, a file a round and process each.

Files are written aside and moved in, so a killed run leaves every finished round readable, and a
resumed one replaces the rounds it runs again. ``docs/records.md`` explains each column.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.records import Score, ScoredRollout
from grpo.rewards import RewardComponent
from grpo.rollouts.group_keys import GroupUnit, group_key
from grpo.training.round_decisions import Decision

Table = Literal["rollouts", "validation"]

TOOL_CALL = pa.struct(
    [("name", pa.string()), ("argument", pa.string()), ("result", pa.string()), ("valid", pa.bool_())]
)

ROLLOUTS_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("round", pa.int32()),
        ("purpose", pa.string()),
        ("problem_id", pa.string()),
        ("slice", pa.string()),
        ("template_id", pa.string()),
        ("prompt_text", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("occurrence", pa.int32()),
        ("member", pa.int32()),
        ("draw", pa.int32()),
        ("context_sha256", pa.string()),
        ("tools", pa.string()),
        ("sampling_settings", pa.string()),
        ("policy_version", pa.int32()),
        ("engine", pa.string()),
        ("completion_text", pa.string()),
        ("completion_tokens", pa.list_(pa.int32())),
        ("completion_drawn", pa.list_(pa.bool_())),
        ("tool_calls", pa.list_(TOOL_CALL)),
        ("finish_reason", pa.string()),
        ("end_token_id", pa.int32()),
        ("old_logprobs", pa.list_(pa.float32())),
        ("sampling_logprobs", pa.list_(pa.float32())),
        ("reward_raw", pa.map_(pa.string(), pa.float64())),
        ("reward_parts", pa.map_(pa.string(), pa.string())),
        ("reward_weighted", pa.map_(pa.string(), pa.float64())),
        ("reward_steps", pa.map_(pa.string(), pa.float64())),
        ("reward", pa.float64()),
        ("unscored_reason", pa.string()),
    ]
)

UPDATES_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.string()),
        ("round", pa.int32()),
        ("verdict", pa.string()),
        ("verdict_reason", pa.string()),
        ("centred", pa.float64()),
        ("advantage", pa.float64()),
        ("recomputed_old_logprobs", pa.list_(pa.float32())),
        ("reference_logprobs", pa.list_(pa.float32())),
        ("reference_version", pa.int32()),
        ("loss_tokens", pa.int32()),
    ]
)


class RolloutLog:
    """Writes the record of one process.

    Args:
        folder: holds ``rollouts/`` and ``updates/``.
        run_id: the run's fingerprint, kept in every row.
        rank: this process among those that train.
        components: the reward's components, for their weights.
        group_unit: what rollouts with one group id have in common.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        rank: int,
        components: Mapping[str, RewardComponent],
        group_unit: GroupUnit = "problem",
    ) -> None:
        self.folder = folder
        self.run_id = run_id
        self.rank = rank
        self.components = components
        self.group_unit = group_unit

    def write_rollouts(
        self,
        round_index: int,
        groups: Sequence[Sequence[ScoredRollout]],
        table: Table = "rollouts",
    ) -> None:
        """Every rollout of the round, before any filter; those of a validation into a table of their own."""
        rows = [self._rollout_row(scored) for group in groups for scored in group]
        self._write(table, round_index, rows, ROLLOUTS_SCHEMA)

    def write_updates(self, round_index: int, decisions: Iterable[Decision]) -> None:
        """What became of each rollout of the round."""
        rows = [
            {
                "rollout_id": decision.rollout_id,
                "round": round_index,
                "verdict": decision.verdict.verdict,
                "verdict_reason": decision.verdict.reason,
                "centred": decision.centred,
                "advantage": decision.advantage,
                "recomputed_old_logprobs": decision.old_logprobs,
                "reference_logprobs": decision.reference_logprobs,
                "reference_version": decision.reference_version,
                "loss_tokens": decision.loss_tokens,
            }
            for decision in decisions
        ]
        self._write("updates", round_index, rows, UPDATES_SCHEMA)

    def _rollout_row(self, scored: ScoredRollout) -> dict[str, Any]:
        rollout, key, group = scored.rollout, scored.rollout.key, scored.rollout.group
        unit = group_key(rollout)
        raw = {name: score.value for name, score in scored.components.items()}
        weighted = {n: None if v is None else self.components[n].weight * v for n, v in raw.items()}
        reasons = [f"{name}: {score.reason}" for name, score in scored.components.items() if score.value is None]
        return {
            "rollout_id": key.rollout_id,
            "run_id": self.run_id,
            "group_id": unit.id(self.group_unit),
            "round": key.round,
            "purpose": key.purpose,
            "problem_id": key.problem_id,
            "slice": group.problem.slice,
            "template_id": key.template_id,
            "prompt_text": group.prompt_text,
            "prompt_tokens": group.prompt_tokens,
            "occurrence": key.occurrence,
            "member": key.member,
            "draw": key.draw,
            "context_sha256": unit.context_sha256,
            "tools": unit.tools,
            "sampling_settings": unit.sampling_settings,
            "policy_version": unit.policy_version,
            "engine": unit.engine,
            "completion_text": rollout.text,
            "completion_tokens": rollout.tokens,
            "completion_drawn": rollout.drawn,
            "tool_calls": [asdict(call) for call in rollout.tool_calls],
            "finish_reason": rollout.finish_reason,
            "end_token_id": rollout.tokens[-1] if rollout.finish_reason == "end_token" else None,
            "old_logprobs": rollout.logprobs,
            "sampling_logprobs": rollout.sampling_logprobs,
            "reward_raw": list(raw.items()),
            "reward_parts": [(n, _parts_line(score)) for n, score in scored.components.items() if score.parts],
            "reward_weighted": list(weighted.items()),
            "reward_steps": list(scored.steps.items()),
            "reward": scored.reward,
            "unscored_reason": None if scored.scored else "; ".join(reasons),
        }

    def forget_from(self, round_index: int) -> None:
        """Remove the rounds that a resumed run is about to run again, whichever processes wrote them."""
        for path in self.folder.glob("*/round-*"):
            if int(path.name.split("-")[1]) >= round_index:
                path.unlink()

    def _write(self, table: str, round_index: int, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
        folder = self.folder / table
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"round-{round_index:05d}-rank-{self.rank}.parquet"
        aside = path.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), aside)
        os.replace(aside, path)


def _parts_line(score: Score) -> str:
    return json.dumps(score.plain_parts(), sort_keys=True)
