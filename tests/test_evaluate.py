"""The evaluation of a policy folder, and the scorer that judges it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from jsonargparse.typing import Path_fr
from transformers import LlamaConfig, LlamaForCausalLM

from grpo import evaluate as stage
from grpo.answer_metrics import IntervalSettings
from grpo.answer_readings import load_reading
from grpo.code_scorer import code_passes_tests
from grpo.evaluate import EvaluateSettings, evaluate, main
from grpo.held_out_answers import COMPLETIONS_SCHEMA, judge, read_answers, refuse_unscored
from grpo.problem_files import write_problems
from grpo.problem_sources import GSM8K, HumanEval
from grpo.records import Problem, PromptGroup, Rollout, RolloutKey, Score
from grpo.rewards.sandbox import SandboxUnavailable, require
from grpo.rollouts.policies import LoadedPolicy, save_policy
from grpo.rollouts.prompts import PromptTemplate
from grpo.rollouts.sampling import SamplingSettings
from grpo.scorers import (
    ScorerError,
    check_scorer,
    lenient_answer,
    load_scorer,
    number_or_text,
    reasoning_gym_score,
    refuse_training_reward,
)
from grpo.training.tiny_policy import character_tokenizer

SCORER = "grpo.scorers.reasoning_gym_score"


def problem(index: int, slice: str = "sums", task: str = "chain_sum", role: str = "train") -> Problem:
    metadata = {"task": task, "entry": {}, "role": role}
    return Problem(f"{slice}-{index}", f"{index} + 1 =", str(index + 1), slice, metadata)


PROBLEMS = [
    *(problem(index) for index in range(4)),
    *(problem(index, "sums_long", role="heldout_only") for index in range(2)),
    *(problem(index, "products", task="products", role="heldout_only") for index in range(2)),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder whose model nobody trained."""
    folder = tmp_path_factory.mktemp("policies") / "random"
    tokenizer = character_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    template = PromptTemplate("plain", "{question}")
    save_policy(folder, LoadedPolicy(model, tokenizer, template, (tokenizer.eos_token_id,)), {"source": "random"})
    return folder


@pytest.fixture
def settings(policy: Path, tmp_path: Path) -> EvaluateSettings:
    write_problems(tmp_path / "heldout.jsonl", PROBLEMS)
    return EvaluateSettings(
        policy=policy,
        name="base",
        problems=tmp_path / "heldout.jsonl",
        completions_folder=tmp_path / "build",
        report_folder=tmp_path / "report",
        sampled=SamplingSettings(max_new_tokens=4),
        intervals=IntervalSettings(resamples=100),
    )


def rollout(text: str, finish: str = "end_token", gold: str = "5", slice: str = "sums") -> Rollout:
    asked = Problem("p", "2 + 3 =", gold, slice, {"task": "chain_sum", "entry": {}})
    group = PromptGroup(asked, "plain", "2 + 3 =", (1, 2, 3))
    return Rollout(RolloutKey(1, "evaluation", 0, "p", "plain"), group, (4, 0), text, (-1.0, -1.0), finish)  # type: ignore[arg-type]


class TestEvaluation:
    def test_everything_is_asked_and_written(self, settings: EvaluateSettings) -> None:
        evaluation = evaluate(settings)
        file = settings.completions_folder / "base" / "completions.parquet"
        assert pq.read_schema(file).names == COMPLETIONS_SCHEMA.names
        answers = read_answers(file)
        assert sum(answer.mode == "greedy" for answer in answers) == 8
        assert sum(answer.mode == "sampled" for answer in answers) == 32
        assert json.loads((settings.report_folder / "base.json").read_text()) == evaluation
        assert evaluation["overall"]["problems"] == 4
        relations = {name: part["relation"] for name, part in evaluation["by_slice"].items()}
        assert relations == {"sums": "trained_on", "sums_long": "other_setting", "products": "other_task"}
        assert set(evaluation["overall"]["sampled"]) == set(evaluation["overall"]["greedy"]) | {
            "pass_at_1",
            "pass_at_4",
        }

    def test_equal_runs_write_equal_bytes(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        again = replace(settings, completions_folder=tmp_path / "b2", report_folder=tmp_path / "r2")
        evaluate(settings)
        evaluate(again)
        for one, other in (
            (settings.report_folder / "base.json", again.report_folder / "base.json"),
            *[(s.completions_folder / "base" / "completions.parquet" for s in (settings, again))],
        ):
            assert one.read_bytes() == other.read_bytes()
        assert str(tmp_path) not in (settings.report_folder / "base.json").read_text()

    def test_the_training_settings_do_not_reach_it(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        """Another group size and temperature in training: the same completions, numbers and identity."""
        found = []
        for group_size in (4, 16):
            folder = tmp_path / f"policy-{group_size}"
            folder.mkdir()
            for path in settings.policy.iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            config = {"model": {"round": {"group_size": group_size}, "sampling": {"temperature": group_size / 8}}}
            (folder / "resolved_config.yaml").write_text(yaml.safe_dump(config))
            found.append(evaluate(replace(settings, policy=folder)))
        assert found[0] == found[1] == evaluate(settings)

    def test_more_samples_keep_the_first_ones(self, settings: EvaluateSettings) -> None:
        file = settings.completions_folder / "base" / "completions.parquet"
        evaluate(settings)
        few = {(a.problem_id, a.mode, a.member): a.text for a in read_answers(file)}
        evaluate(replace(settings, samples_per_problem=6))
        many = {(a.problem_id, a.mode, a.member): a.text for a in read_answers(file)}
        assert len(many) > len(few)
        assert few.items() <= many.items()

    def test_another_seed_draws_others_and_leaves_greedy(self, settings: EvaluateSettings) -> None:
        one, other = evaluate(settings), evaluate(replace(settings, seed=2))
        assert one["overall"]["greedy"] == other["overall"]["greedy"]
        file = settings.completions_folder / "base" / "completions.parquet"
        second = [a.text for a in read_answers(file) if a.mode == "sampled"]
        evaluate(settings)
        assert second != [a.text for a in read_answers(file) if a.mode == "sampled"]

    def test_the_shipped_config_is_read(self, settings: EvaluateSettings, capsys: pytest.CaptureFixture[str]) -> None:
        config = Path(__file__).parents[1] / "configs" / "evaluate.yaml"
        written = yaml.safe_load(config.read_text())
        assert written["sampled"]["max_new_tokens"] == EvaluateSettings(Path("p"), "n").sampled.max_new_tokens
        places = [f"--{key}={getattr(settings, key)}" for key in ("problems", "completions_folder", "report_folder")]
        main([f"--config={config}", f"--policy={settings.policy}", "--name=trained", *places])
        assert (settings.report_folder / "trained.json").is_file()
        *progress, last = capsys.readouterr().out.splitlines()
        assert progress == [
            "trained: 8 greedy completions of 8 problems",
            "trained: 32 sampled completions of 8 problems",
            progress[-1],
        ]
        assert re.fullmatch("trained: the reward pays 0 of 40 completions and 0 of [0-9]+ probes.*", progress[-1])
        assert last.startswith("trained: correct on 4 held-out problems: sampled ")


class TestLoopholes:
    @pytest.fixture
    def rewarded(self, settings: EvaluateSettings, tmp_path: Path) -> EvaluateSettings:
        reward = {"answer": {"check": "test_loopholes.mentions_answer", "limit_seconds": None}}
        (tmp_path / "rewards.yaml").write_text(yaml.safe_dump(reward))
        return replace(settings, rewards=Path_fr(str(tmp_path / "rewards.yaml")))

    def test_they_are_written_beside_the_completions(self, rewarded: EvaluateSettings) -> None:
        evaluation = evaluate(rewarded)
        lines = (rewarded.completions_folder / "base" / "loopholes.jsonl").read_text().splitlines()
        found = evaluation["loopholes"]
        assert len(lines) == sum(one["loopholes"] for part in found["by_slice"].values() for one in part.values()) > 0
        assert {json.loads(line)["source"] for line in lines} >= {"probe"}
        assert found["components"] == ["answer"]
        assert evaluation["identity"]["rewards_sha256"] is not None

    def test_the_reward_reaches_no_other_number(self, rewarded: EvaluateSettings) -> None:
        evaluation = evaluate(rewarded)
        without = evaluate(replace(rewarded, rewards=None))
        assert without["loopholes"] is None
        assert without["identity"]["rewards_sha256"] is None
        assert (evaluation["overall"], evaluation["by_slice"]) == (without["overall"], without["by_slice"])
        assert (rewarded.completions_folder / "base" / "loopholes.jsonl").read_bytes() == b""

    def test_a_reward_that_cannot_be_used_stops_it_before_anything_is_asked(
        self, rewarded: EvaluateSettings, tmp_path: Path
    ) -> None:
        (tmp_path / "rewards.yaml").write_text("answer: {check: no.such.reward}")
        with pytest.raises(ValueError, match=r"rewards is .*rewards\.yaml, which cannot be used"):
            evaluate(rewarded)
        assert not rewarded.report_folder.exists()


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pass_at_k": (1, 8)}, "pass_at_k holds 8 with samples_per_problem 4"),
            ({"samples_per_problem": 0}, "samples_per_problem is 0"),
            ({"probed_per_slice": 0}, "probed_per_slice is 0"),
            ({"max_unscored_share": 1.5}, "max_unscored_share is 1.5"),
            ({"name": "../base"}, "name is '../base'"),
            ({"sampled": SamplingSettings(temperature=0)}, "sampled.temperature is 0"),
        ],
    )
    def test_settings(self, settings: EvaluateSettings, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            replace(settings, **change)

    @pytest.mark.parametrize("scorer", ["nothing", "grpo.scorers.nothing", "no.such.module", "grpo.scorers._NUMBER"])
    def test_a_scorer_that_is_none(self, settings: EvaluateSettings, scorer: str) -> None:
        with pytest.raises(ScorerError, match=f"scorer is '{scorer}'"):
            evaluate(replace(settings, scorer=scorer))
        assert not settings.report_folder.exists()

    def test_a_scorer_that_the_policy_was_trained_on(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        folder = tmp_path / "trained"
        folder.mkdir()
        rewards = {"model": {"rewards": {"answer": {"check": SCORER, "weight": 1.0}}}}
        (folder / "resolved_config.yaml").write_text(yaml.safe_dump(rewards))
        with pytest.raises(ScorerError, match="which the policy was trained on"):
            evaluate(replace(settings, policy=folder))

    def test_another_name_of_a_training_reward(self) -> None:
        config = {"rewards": [{"check": SCORER}]}
        with pytest.raises(ScorerError, match="trained on"):
            refuse_training_reward("tests.alias", reasoning_gym_score, config)
        refuse_training_reward(SCORER, reasoning_gym_score, {"rewards": [{"check": "grpo.rewards.exact_answer"}]})
        refuse_training_reward(SCORER, reasoning_gym_score, None)

    def test_an_instance_of_a_training_reward(self) -> None:
        config = {"rewards": {"math": {"check": {"class_path": "grpo.rewards.math_answer.MathAnswer"}}}}
        path = "grpo.rewards.math_answer.math_answer"
        with pytest.raises(ScorerError, match="trained on"):
            refuse_training_reward(path, load_scorer(path), config)

    @pytest.mark.parametrize("gold", ["def f():\n    return 1", "and so on...", ""])
    def test_a_gold_answer_that_cannot_be_read(self, gold: str) -> None:
        asked = [*PROBLEMS[:2], replace(PROBLEMS[2], answer=gold)]
        with pytest.raises(ScorerError, match=r"read as one line, and 1 of 3 problems .* of sums-2: give these"):
            check_scorer("words", lambda *item: number_or_text(*item), asked)

    def test_completions_without_a_verdict_are_kept(
        self, settings: EvaluateSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ScorerError("out of order")

        evaluate(settings)
        kept = settings.completions_folder / "base" / "unjudged.jsonl"
        assert not kept.exists()
        monkeypatch.setattr(stage, "judge", fail)
        with pytest.raises(ScorerError, match=rf"out of order; the completions are kept in {kept}"):
            evaluate(settings)
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
        answers = read_answers(kept.parent / "completions.parquet")
        assert [row["text"] for row in rows] == [answer.text for answer in answers]

    def test_a_scorer_that_refuses_gold(self) -> None:
        wrong = replace(PROBLEMS[0], answer="not a number", metadata={"entry": {}})
        with pytest.raises(ScorerError, match=r"gold answer 'not a number' of sums-0 .*names no Reasoning Gym"):
            check_scorer(SCORER, reasoning_gym_score, [wrong])

    def test_a_scorer_that_takes_anything(self) -> None:
        with pytest.raises(ScorerError, match="gives 1 where problem sums-0 has no answer"):
            check_scorer("always", lambda *_: Score(1.0), PROBLEMS[:1])
        with pytest.raises(ScorerError, match=f"gives 1 to .* of {len(PROBLEMS) - 1} answers to other problems"):
            check_scorer("any answer", lambda _, answer: Score(float(answer is not None)), PROBLEMS)

    def test_a_verdict_that_is_missing_is_no_zero(self) -> None:
        [judged] = judge([("greedy", rollout("5"))], lambda *_: Score.unscorable("out of order"))
        assert (judged.strict_score, judged.correct, judged.lenient_correct) == (None, None, None)
        assert (judged.unscored, judged.unscored_reason) == (True, "out of order")
        assert (judged.attempt.correct, judged.attempt.unscored) == (None, True)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sampled": SamplingSettings(max_new_tokens=60)}, r"sampled\.max_new_tokens is 60, .* at most 57"),
            ({"sampled": SamplingSettings(max_new_tokens=10**11)}, r"sampled\.max_new_tokens is 100000000000"),
            ({"max_prompt_tokens": 6}, r"8 prompts are longer than max_prompt_tokens = 6"),
        ],
    )
    def test_what_does_not_fit_the_model_is_told_before_it_is_loaded(
        self, settings: EvaluateSettings, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
    ) -> None:
        monkeypatch.setattr(stage, "load_policy", lambda _: pytest.fail("a model was loaded"))
        with pytest.raises(ValueError, match=message):
            evaluate(replace(settings, **change))
        assert not settings.report_folder.exists()

    def test_a_question_with_a_special_token_is_told_before_a_scorer_is_asked(
        self, settings: EvaluateSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_problems(settings.problems, [*PROBLEMS, replace(PROBLEMS[0], id="odd", question="<end> + 1 =")])
        monkeypatch.setattr(stage, "check_scorer", lambda *_: pytest.fail("the scorer was asked"))
        with pytest.raises(ValueError, match="problem odd: the question holds the special token '<end>'"):
            evaluate(settings)

    @pytest.mark.parametrize("text", ["model: [", "- a list", "\xff"])
    def test_a_resolved_config_that_is_damaged(self, settings: EvaluateSettings, tmp_path: Path, text: str) -> None:
        folder = shutil.copytree(settings.policy, tmp_path / "policy")
        (folder / "resolved_config.yaml").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"resolved_config\.yaml .*dvc repro train"):
            evaluate(replace(settings, policy=folder))

    @pytest.mark.parametrize("key", ["completions_folder", "report_folder"])
    def test_an_output_that_cannot_be_written_is_told_before_the_model_is_asked(
        self, settings: EvaluateSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
    ) -> None:
        (tmp_path / "file").write_text("mine")
        monkeypatch.setattr(stage, "load_policy", lambda _: pytest.fail("a model was loaded"))
        with pytest.raises(ValueError, match=rf"{key} is .*file is not a folder"):
            evaluate(replace(settings, **{key: tmp_path / "file" / "results"}))

    def test_a_folder_that_is_no_policy(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not a policy folder"):
            evaluate(replace(settings, policy=tmp_path))


def only_digits(asked: Problem, answer: str | None) -> Score:
    """Has no verdict on what is no number."""
    if answer is not None and not answer.strip().isdigit():
        return Score.unscorable("no digits")
    return number_or_text(asked, answer)


class TestUnscored:
    @pytest.fixture
    def hesitant(self, settings: EvaluateSettings) -> EvaluateSettings:
        return replace(settings, scorer="unsure_scorer.unsure_of_silence")

    def test_the_first_stops_it_unless_more_are_allowed(self, hesitant: EvaluateSettings) -> None:
        words = r"could not judge the answer None to \w+-[13]: nothing was said; \d+ of 40 answers \(.*%\) are without "
        words += "a verdict, and max_unscored_share is 0: "
        with pytest.raises(ScorerError, match=words):
            evaluate(hesitant)
        kept = hesitant.completions_folder / "base" / "unjudged.jsonl"
        assert len(kept.read_text().splitlines()) == 40
        assert not hesitant.report_folder.joinpath("base.json").exists()
        with pytest.raises(ScorerError, match=r"max_unscored_share is 0\.01"):
            evaluate(replace(hesitant, max_unscored_share=0.01))

    def test_they_count_as_unscored_and_in_no_accuracy(
        self, hesitant: EvaluateSettings, capsys: pytest.CaptureFixture[str]
    ) -> None:
        evaluation = evaluate(replace(hesitant, max_unscored_share=1.0))
        answers = read_answers(hesitant.completions_folder / "base" / "completions.parquet")
        reasons = {answer.unscored_reason for answer in answers}
        assert reasons == {None, "nothing was said"}
        assert all(answer.strict_score is None for answer in answers if answer.correct is None)
        for name, part in {**evaluation["by_slice"], None: evaluation["overall"]}.items():
            for mode in ("sampled", "greedy"):
                here = [
                    a for a in answers if a.mode == mode and (a.role == "train" if name is None else a.slice == name)
                ]
                scored = [a for a in here if a.correct is not None]
                found = part[mode]
                share = sum(a.unscored for a in here) / len(here)
                assert found["unscored"]["value"] == pytest.approx(share, abs=1e-6)
                right = sum(a.correct is True for a in scored) / len(scored) if scored else None
                assert found["accuracy"]["value"] == (right if right is None else pytest.approx(right, abs=1e-6))
        assert re.search(r"\(\d+\.\d\d% unscored\)", capsys.readouterr().out.splitlines()[-1])
        assert not (hesitant.completions_folder / "base" / "unjudged.jsonl").exists()

    def test_a_share_that_is_allowed_changes_nothing_where_all_are_scored(self, settings: EvaluateSettings) -> None:
        evaluation = evaluate(settings)
        assert evaluate(replace(settings, max_unscored_share=0.5)) == evaluation
        assert evaluation["overall"]["sampled"]["unscored"]["value"] == 0.0

    @pytest.mark.parametrize(
        ("text", "gold", "correct", "lenient", "reason"),
        [
            ("5", "5", True, True, None),  # right: what the lenient reading finds changes nothing
            ("so 5", "5", None, True, "no digits"),
            ("so 6", "5", None, None, "no digits"),  # the strict answer could be right
            ("6", "5", False, False, None),
            ("", "5", False, False, None),
        ],
    )
    def test_one_verdict_of_two(
        self, text: str, gold: str, correct: bool | None, lenient: bool | None, reason: str | None
    ) -> None:
        [judged] = judge([("greedy", rollout(text, gold=gold))], lambda *item: only_digits(*item))
        assert (judged.correct, judged.lenient_correct, judged.unscored_reason) == (correct, lenient, reason)

    def test_the_first_without_a_verdict_is_named(self) -> None:
        texts = ["6", "seven", "eight"]
        judged = judge([("greedy", rollout(text)) for text in texts], lambda *item: only_digits(*item))
        refuse_unscored(judged, 2 / 3)
        with pytest.raises(ScorerError, match=r"the answer 'seven' to p: no digits; 2 of 3 answers \(66\.67%\)"):
            refuse_unscored(judged, 0.66)
        refuse_unscored([], 0.0)

    def test_a_reason_of_several_lines_is_told_in_one(self) -> None:
        [judged] = judge([("greedy", rollout("5"))], lambda *_: Score.unscorable("out\nof\r\n order\n"))
        with pytest.raises(ScorerError, match="out of order; ") as caught:
            refuse_unscored([judged], 0.0)
        assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(ScorerError, match=r"cannot be scored \(out of order\)") as caught:
            check_scorer("none", lambda *_: Score.unscorable("out\nof\r\n order"), PROBLEMS[:1])
        assert len(str(caught.value).splitlines()) == 1


GSM8K_ROWS = [
    {"question": f"What is {i} and {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### 1,{200 + i}"}
    for i in range(3)
]
HUMANEVAL_ROWS = [
    {
        "task_id": f"T/{i}",
        "prompt": f"def add{i}(n):\n",
        "entry_point": f"add{i}",
        "canonical_solution": f"    return n + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {1 + i}\n",
    }
    for i in range(3)
]


class TestShippedExamples:
    """The examples for published data sets: their own reading and scorer, on a policy that nobody trained."""

    def run(self, example: str, source: Any, settings: EvaluateSettings, tmp_path: Path) -> dict[str, Any]:
        write_problems(tmp_path / "heldout.jsonl", [row.problem for row in source.read()])
        configs = Path(__file__).parents[1] / "configs"
        places = [f"--{key}={getattr(settings, key)}" for key in ("problems", "completions_folder", "report_folder")]
        short = ["--sampled.max_new_tokens=4", "--intervals.resamples=100", "--max_prompt_tokens=60"]
        both = [f"--config={configs / 'evaluate.yaml'}", f"--config={configs / 'examples' / example}"]
        main([*both, *places, *short, "--name=base", f"--policy={settings.policy}"])
        found: dict[str, Any] = json.loads((settings.report_folder / "base.json").read_text())
        return found

    def test_gsm8k(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K_ROWS))
        found = self.run("gsm8k_evaluate.yaml", GSM8K(rows=tmp_path / "rows.jsonl"), settings, tmp_path)
        assert found["identity"]["reading"] == "grpo.answer_readings.last_hash_line"
        assert found["overall"]["sampled"]["accuracy"]["value"] == 0.0
        asked = next(iter(GSM8K(rows=tmp_path / "rows.jsonl").read())).problem
        said = [rollout(row["answer"], gold=asked.answer) for row in GSM8K_ROWS[:2]]
        cut_off = rollout(GSM8K_ROWS[0]["answer"], "length", gold=asked.answer)
        judged = judge([("greedy", each) for each in (*said, cut_off)], number_or_text, load_reading("last_hash_line"))
        assert [(each.strict_answer, each.correct) for each in judged] == [
            ("1,200", True),
            ("1,201", False),
            (None, False),
        ]

    def test_humaneval(self, settings: EvaluateSettings, tmp_path: Path) -> None:
        try:
            require("bubblewrap")
        except SandboxUnavailable as error:
            pytest.skip(f"programs cannot be isolated on this machine: {error}")
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HUMANEVAL_ROWS))
        source = HumanEval(rows=tmp_path / "rows.jsonl")
        found = self.run("humaneval_evaluate.yaml", source, settings, tmp_path)
        identity = found["identity"]
        assert (identity["reading"], identity["scorer"]) == (
            "grpo.answer_readings.final_code",
            "grpo.code_scorer.code_passes_tests",
        )
        assert identity["scorer_settings"]["init_args"]["limit_seconds"] == 10.0
        for mode in ("sampled", "greedy"):
            assert found["overall"][mode]["accuracy"]["value"] == 0.0
            assert found["overall"][mode]["lenient_accuracy"] == {"value": None, "low": None, "high": None}
        first, second, _ = (row.problem for row in source.read())
        group = PromptGroup(first, "plain", first.question, (1,))
        texts = [f"Here:\n{first.answer}\nIt adds.", second.answer, "def add0(n): return -n"]
        said = [replace(rollout(text), group=group) for text in texts]
        judged = judge([("greedy", each) for each in said], code_passes_tests, load_reading("final_code"))
        assert [each.correct for each in judged] == [True, False, False]
        assert {each.lenient_answer for each in judged} == {None}
        assert [each.lenient_correct for each in judged] == [True, False, False]


class TestReadings:
    @pytest.mark.parametrize(
        ("text", "finish", "strict", "correct", "lenient_correct"),
        [
            (" 5", "end_token", "5", True, True),
            (" 5", "length", None, False, True),  # cut off: it might have gone on to 53
            ("The answer is 5", "end_token", "The answer is 5", False, True),
            ("It is\n5", "end_token", None, False, True),
            (" 6", "end_token", "6", False, False),
            ("", "end_token", None, False, False),
            ("no idea", "length", None, False, False),
        ],
    )
    def test_strict_and_lenient(
        self, text: str, finish: str, strict: str | None, correct: bool, lenient_correct: bool
    ) -> None:
        [judged] = judge([("greedy", rollout(text, finish))], lambda *item: reasoning_gym_score(*item))
        assert (judged.strict_answer, judged.correct, judged.lenient_correct) == (strict, correct, lenient_correct)

    @pytest.mark.parametrize(
        ("text", "gold", "found"),
        [
            (" 153.", "153", "153"),
            ("12 + 3 = 15\nand 4 more", "15", "15"),
            ("Let me see.\nIt is 7", "7", "7"),
            ("5-3", "2", "3"),
            ("so -3", "-3", "-3"),
            ("\u22124", "-4", "-4"),
            ("1,234 apples", "1234", "1234"),
            ("0.5", "0.5", "0.5"),
            ("version x86", "86", None),
            ("nothing", "3", None),
            ("It is Ayan.", "Ayan", "Ayan"),
            ("\n\n O'Neill!\nrest", "O'Neill", "O'Neill"),
            ("the big red dog", "red dog", "red dog"),
            ("?!", "Ayan", None),
            ("1/2", "1/2", "1/2"),
            ("It is -3/4, I think", "-3/4", "-3/4"),
            ("so 0.5", "1/2", "0.5"),
            ("1/2", "2", "2"),
        ],
    )
    def test_what_the_lenient_reading_finds(self, text: str, gold: str, found: str | None) -> None:
        assert lenient_answer(text, gold) == found

    def test_the_reading_that_is_named_is_the_one_that_reads(self, settings: EvaluateSettings) -> None:
        found = evaluate(replace(settings, reading="last_boxed", scorer="grpo.scorers.number_or_text"))
        assert found["identity"]["reading"] == "grpo.answer_readings.last_boxed"
        answers = read_answers(settings.completions_folder / "base" / "completions.parquet")
        assert {answer.strict_answer for answer in answers} == {None}
        assert evaluate(settings)["identity"]["reading"] == "grpo.answer_readings.strict_answer"

    def test_a_reading_that_is_none_stops_it_before_anything_is_asked(self, settings: EvaluateSettings) -> None:
        with pytest.raises(ValueError, match="reading is 'nothing'"):
            evaluate(replace(settings, reading="nothing"))
        assert not settings.report_folder.exists()

    @pytest.mark.parametrize("gold", ["1/2", r"\frac{1}{2}", "x^2 + 1"])
    def test_the_lenient_reading_is_never_the_worse(self, gold: str) -> None:
        [judged] = judge([("greedy", rollout(gold, gold=gold))], lambda *item: number_or_text(*item))
        assert (judged.correct, judged.lenient_correct, judged.lenient_answer) == (True, True, gold)

    def test_partial_credit_is_not_correct(self) -> None:
        """Reasoning Gym gives 1/3 of a point where the gold answer is a third of the text."""
        [judged] = judge([("greedy", rollout("5 x"))], lambda *item: reasoning_gym_score(*item))
        assert 0 < judged.strict_score < 1
        assert not judged.correct

    def test_the_scorer_is_the_tasks_own(self) -> None:
        assert load_scorer(SCORER) is reasoning_gym_score
        assert reasoning_gym_score(PROBLEMS[0], "1.0").value == 1
        assert reasoning_gym_score(PROBLEMS[0], None).value == 0


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        ("42", "42", 1.0),
        ("42", "42.0", 1.0),
        ("1200", "$1,200", 1.0),
        ("0.5", "1/2", 1.0),
        ("25", "25%", 0.0),
        ("25%", "25%", 1.0),
        ("12", "1,2", 0.0),
        ("123", "1,2,3", 0.0),
        ("123", "0,123", 0.0),
        ("1234567", "1,234567", 0.0),
        ("1234567.5", "-1,234,567.5", 0.0),
        ("1234567.5", "1,234,567.5", 1.0),
        ("-3", "\u22123", 1.0),
        ("42", "43", 0.0),
        ("42", "42 apples", 0.0),
        ("42", "1e999999999", 0.0),
        ("42", "4/0", 0.0),
        ("42", None, 0.0),
        ("The red one", "the  RED one", 1.0),
        ("The red one", "the blue one", 0.0),
    ],
)
def test_a_plain_scorer_reads_numbers_and_words(gold: str, answer: str | None, score: float) -> None:
    assert number_or_text(Problem("p", "q", gold, "s"), answer).value == score
