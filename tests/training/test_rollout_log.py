import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fixtures_policy import TOKENIZER, scored_group

from grpo.records import Score, ToolCall
from grpo.rewards import RewardComponent
from grpo.rollouts.flat_groups import GroupVerdict
from grpo.rollouts.group_keys import group_key
from grpo.rollouts.sampling import SamplingSettings
from grpo.training import rollout_log
from grpo.training.rollout_log import ROLLOUTS_SCHEMA, UPDATES_SCHEMA, RolloutLog
from grpo.training.round_decisions import Decision


def log(folder: Path, rank: int = 0) -> RolloutLog:
    components = {
        name: RewardComponent(lambda _problem, _text: Score(1.0), weight)
        for name, weight in (("a", 2.0), ("b", -1.0), ("made", 1.0))
    }
    return RolloutLog(folder, "run1", rank, components)


def test_every_rollout_is_a_row_that_says_all_about_it(tmp_path: Path) -> None:
    scored, cut = scored_group([1.75, None], [3, 2])
    sampled = SamplingSettings(0.5, 7, 9).sampling_policy(weights_version=4)
    called = ToolCall("calculator", "1 + 1", "2")
    rollout = replace(
        scored.rollout,
        sampling_policy=sampled,
        drawn=(True, False, True),
        sampling_logprobs=(-0.25, 0.0, -0.25),
        tool_calls=(called,),
    )
    steps = {"weighted_sum": 1.75}
    read = Score(1.0, parts={"answer": "2", "odd": {1}})
    scored = replace(scored, rollout=rollout, components={"a": read, "b": Score(0.25)}, steps=steps)
    cut = replace(cut, rollout=replace(cut.rollout, finish_reason="length"))
    cut = replace(cut, components={"a": Score.unscorable("time ran out"), "b": Score.not_applicable("no code")})
    log(tmp_path).write_rollouts(0, [[scored, cut]])
    first, second = pq.read_table(tmp_path / "rollouts" / "round-00000-rank-0.parquet").to_pylist(
        maps_as_pydicts="strict"
    )
    tokens = scored.rollout.tokens
    assert first == {
        "rollout_id": scored.rollout.key.rollout_id,
        "run_id": "run1",
        "group_id": group_key(rollout).id("problem"),
        "round": 0,
        "purpose": "train",
        "problem_id": "p",
        "slice": "sums",
        "template_id": "bare",
        "prompt_text": "1+1=",
        "prompt_tokens": TOKENIZER("1+1=").input_ids,
        "occurrence": 0,
        "member": 0,
        "draw": 0,
        "context_sha256": hashlib.sha256(b"").hexdigest(),
        "tools": "{}",
        "sampling_settings": json.dumps(
            {
                "max_new_tokens": 7,
                "max_rows": 9,
                "min_p": 0.0,
                "shared_prompt": True,
                "stop_strings": [],
                "temperature": 0.5,
                "top_k": 0,
                "top_p": 1.0,
            }
        ),
        "policy_version": 4,
        "engine": "transformers",
        "completion_text": scored.rollout.text,
        "completion_tokens": list(tokens),
        "completion_drawn": [True, False, True],
        "tool_calls": [{"name": "calculator", "argument": "1 + 1", "result": "2", "valid": True}],
        "finish_reason": "end_token",
        "end_token_id": tokens[-1],
        "old_logprobs": [-0.5] * 3,
        "sampling_logprobs": [-0.25, 0.0, -0.25],
        "reward_raw": {"a": 1.0, "b": 0.25},
        "reward_parts": {"a": '{"answer": "2", "odd": "{1}"}'},
        "reward_weighted": {"a": 2.0, "b": -0.25},
        "reward_steps": {"weighted_sum": 1.75},
        "reward": 1.75,
        "unscored_reason": None,
    }
    assert second["member"] == 1
    assert second["end_token_id"] is None
    assert second["completion_drawn"] is None
    assert second["sampling_logprobs"] is None
    assert second["reward_steps"] == {}
    assert second["group_id"] != first["group_id"]  # sampled under other settings
    assert second["reward"] is None
    assert second["reward_raw"] == {"a": None, "b": None}
    assert second["reward_parts"] == {}
    assert second["reward_weighted"] == {"a": None, "b": None}
    assert second["unscored_reason"] == "a: time ran out; b: no code"


def test_a_decision_is_a_row_under_the_name_of_its_rollout(tmp_path: Path) -> None:
    skipped = GroupVerdict("skipped_flat", "all 4 scored members earned 1.0")
    log(tmp_path, rank=2).write_updates(
        31,
        [
            Decision("r1", GroupVerdict("kept"), 0.5, 1.0, (-1.25, -0.5), (-1.5, -2.0), 7, 2),
            Decision("r2", skipped, None, None, None, None, None, 0),
        ],
    )
    rows = pq.read_table(tmp_path / "updates" / "round-00031-rank-2.parquet").to_pylist()
    assert rows == [
        {
            "rollout_id": "r1",
            "round": 31,
            "verdict": "kept",
            "verdict_reason": "",
            "centred": 0.5,
            "advantage": 1.0,
            "recomputed_old_logprobs": [-1.25, -0.5],
            "reference_logprobs": [-1.5, -2.0],
            "reference_version": 7,
            "loss_tokens": 2,
        },
        {
            "rollout_id": "r2",
            "round": 31,
            "verdict": "skipped_flat",
            "verdict_reason": "all 4 scored members earned 1.0",
            "centred": None,
            "advantage": None,
            "recomputed_old_logprobs": None,
            "reference_logprobs": None,
            "reference_version": None,
            "loss_tokens": 0,
        },
    ]


def test_a_file_without_rows_has_the_columns_too(tmp_path: Path) -> None:
    log(tmp_path).write_rollouts(0, [])  # a process without a validation problem, for one
    log(tmp_path).write_updates(0, [])
    assert pq.read_schema(tmp_path / "rollouts" / "round-00000-rank-0.parquet") == ROLLOUTS_SCHEMA
    assert pq.read_schema(tmp_path / "updates" / "round-00000-rank-0.parquet") == UPDATES_SCHEMA


def test_validation_has_a_table_of_its_own(tmp_path: Path) -> None:
    log(tmp_path).write_rollouts(2, [scored_group([1.0, 0.0])], table="validation")
    assert [path.name for path in tmp_path.iterdir()] == ["validation"]
    [path] = (tmp_path / "validation").iterdir()
    assert pq.read_table(path).num_rows == 2


def test_rounds_that_are_run_again_are_taken_out_whoever_wrote_them(tmp_path: Path) -> None:
    for rank in (0, 1):
        for number in range(4):
            log(tmp_path, rank).write_rollouts(number, [scored_group([1.0, 0.0])])
            log(tmp_path, rank).write_updates(number, [])
    log(tmp_path).forget_from(2)
    for table in ("rollouts", "updates"):
        names = sorted(path.name for path in (tmp_path / table).iterdir())
        assert names == [f"round-{n:05d}-rank-{rank}.parquet" for n in (0, 1) for rank in (0, 1)]


def test_a_round_run_again_replaces_its_file(tmp_path: Path) -> None:
    for rewards in ([1.0, 0.0], [0.5, 0.0, 1.0]):
        log(tmp_path).write_rollouts(3, [scored_group(rewards)])
    [path] = (tmp_path / "rollouts").iterdir()
    assert pq.read_table(path).num_rows == 3


def test_a_write_that_is_cut_off_leaves_the_finished_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path).write_rollouts(0, [scored_group([1.0, 0.0])])

    def half(_table: object, path: Path) -> None:
        path.write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(rollout_log.pq, "write_table", half)
    with pytest.raises(KeyboardInterrupt):
        log(tmp_path).write_rollouts(0, [scored_group([1.0, 0.0, 1.0])])
    [finished] = (tmp_path / "rollouts").glob("*.parquet")
    assert pq.read_table(finished).num_rows == 2
