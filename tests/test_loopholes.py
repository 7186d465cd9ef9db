"""What the reward pays and the scorer rejects: found, counted, written by the evaluation and shown by the report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from report_inputs import INTERVALS, answers, base_skill, trained_skill, write_experiment

from grpo.answer_readings import Reading
from grpo.held_out_answers import HeldOutAnswer
from grpo.loopholes import (
    RewardsError,
    Tried,
    find_loopholes,
    held_components,
    loophole_headline,
    loophole_lines,
    loophole_numbers,
    read_rewards,
)
from grpo.records import Problem, Score
from grpo.report import ReportSettings, make_report
from grpo.rewards import Reward, RewardComponent
from grpo.rewards.answer_format import answer_format
from grpo.rewards.coin_flip import CoinFlip
from grpo.rewards.exact_answer import exact_answer
from grpo.scorers import reasoning_gym_score

CONFIGS = Path(__file__).parents[1] / "configs"
HOSTILE = "7 | <script>alert(1)</script>\n`x` \u202e \\| ![a](b)"


def mentions_answer(problem: Problem, completion: str) -> Score:
    """The careless reward of docs/examples/a_loophole.md."""
    return Score(float(problem.answer in re.findall(r"\d+", completion)))


def fails_on_lists(_: Problem, completion: str) -> Score:
    return Score.unscorable("a list") if "," in completion else Score(0.0)


def here(check: Reward) -> RewardComponent:
    """Judged in this process: worker processes would take most of the time, and have tests of their own."""
    return RewardComponent(check, limit_seconds=None)


def problems(count: int = 6, slice: str = "sums", role: str = "train") -> list[Problem]:
    metadata = {"task": "chain_sum", "entry": {}, "role": role}
    return [Problem(f"{slice}-{i}", f"{i + 20} + 1 =", str(i + 21), slice, metadata) for i in range(count)]


def answer(problem: Problem, text: str, lenient: bool = False) -> HeldOutAnswer:
    [model, *_] = answers(base_skill)
    changes = {"problem_id": problem.id, "slice": problem.slice, "gold": problem.answer, "text": text}
    return replace(model, **changes, correct=False, lenient_correct=lenient, strict_answer=None, lenient_answer="9")  # type: ignore[arg-type]


def tried(
    check: Reward, asked: Sequence[Problem], given: Sequence[HeldOutAnswer] = (), per_slice: int | None = None
) -> list[Tried]:
    return find_loopholes({"r": here(check)}, asked, given, lambda *item: reasoning_gym_score(*item), per_slice)


class TestWhatCounts:
    def test_a_careless_reward_is_found_out_by_probes(self) -> None:
        found = tried(mentions_answer, problems())
        names = {one.name for one in found if one.loophole}
        assert names >= {"listed_range", "either", "buried", "tags_second_block", "box_taken_back"}
        assert not names & {"empty", "neighbour", "answer_of_another"}

    def test_the_shipped_reward_is_not(self) -> None:
        found = tried(exact_answer, problems())
        assert len(found) > 6 * 40
        assert [one.row() for one in found if one.paid] == []

    def test_the_policys_own_completions(self) -> None:
        """Paid and rejected counts; paid and right in either reading does not; nor does what is not paid."""
        first, second, third = problems(3)
        given = [answer(first, "21 or 9"), answer(second, "22, so 22 or so", lenient=True), answer(third, "9")]
        own = [one for one in tried(mentions_answer, problems(3), given) if one.source == "greedy"]
        assert [(one.paid, one.loophole) for one in own] == [(True, True), (True, False), (False, False)]
        assert own[0].row() == {
            "problem_id": "sums-0",
            "slice": "sums",
            "question": "20 + 1 =",
            "gold": "21",
            "source": "greedy",
            "name": "0",
            "text": "21 or 9",
            "components": {"r": 1.0},
            "reward": 1.0,
            "most": 1.0,
            "reason": "Read strictly: no answer; leniently: 9.",
        }

    def test_what_a_check_fails_on_counts_nowhere(self) -> None:
        found = tried(fails_on_lists, problems())
        numbers = loophole_numbers(found, {"r": RewardComponent(fails_on_lists)}, INTERVALS)
        counts = numbers["overall"]["probe"]
        assert counts["unjudged"] == sum("," in one.text for one in found) > 0
        assert counts["loopholes"] == 0

    def test_a_paid_probe_without_a_verdict_is_no_loophole(self) -> None:
        components = {"r": here(mentions_answer)}
        found = find_loopholes(components, problems(), [], lambda *_: Score.unscorable("out of order"))
        assert any(one.paid for one in found)
        assert [one for one in found if one.loophole] == []
        assert all(one.unjudged is one.paid for one in found)

    @pytest.mark.parametrize(
        ("weights", "paid"), [((1.0, 0.1), True), ((0.1, 1.0), False), ((1.0, 1.0), True), ((1.0, -1.0), True)]
    )
    def test_what_is_paid_but_not_in_full(self, weights: tuple[float, float], paid: bool) -> None:
        """A wrong answer without the form counts where it earns half of the most; form alone does not."""
        components = {
            "answer": RewardComponent(mentions_answer, weights[0], limit_seconds=None),
            "form": RewardComponent(lambda *_: Score(0.0), weights[1], limit_seconds=None),
        }
        [first] = problems(1)
        [one, *_] = find_loopholes(components, [first], [answer(first, "21 or 9")], lambda *_: Score(0.0))
        assert (one.paid, one.loophole) == (paid, paid)
        assert (one.row()["reward"], one.row()["most"]) == (weights[0], sum(w for w in weights if w > 0))
        [one, *_] = find_loopholes(components, [first], [answer(first, "21 or 9")], lambda *_: Score(0.0), None, 0.95)
        assert one.paid is (weights[1] < 0)

    def test_probes_are_read_as_the_completions_are(self) -> None:
        """The scorer takes what this reading finds, and nothing that the default one would find."""
        shout = Reading("here.shout", lambda text: f"{text}!", lenient=False)

        def scorer(_: Problem, read: str | None) -> Score:
            return Score(float(str(read).endswith("!")))

        components = {"r": here(lambda *_: Score(1.0))}
        found = find_loopholes(components, problems(1), [], lambda *item: scorer(*item), reading=shout)
        assert [one.readings for one in found] == [(f"{one.text}!", None) for one in found] != []
        assert {(one.accepted, one.loophole) for one in found} == {(True, False)}
        found = find_loopholes(components, problems(1), [], lambda *item: scorer(*item))
        assert any(one.loophole for one in found)

    def test_form_alone_is_not_paid(self) -> None:
        components = {"exact_answer": here(exact_answer), "answer_format": RewardComponent(answer_format, 0.1, None)}
        [first] = problems(1)
        [one, *_] = find_loopholes(components, [first], [answer(first, "9")], lambda *_: Score(0.0))
        assert (one.reward, one.paid) == (0.1, False)

    def test_controls_and_what_is_not_paid_have_none(self) -> None:
        components = {
            "coin": RewardComponent(CoinFlip(seed=1)),
            "answer": RewardComponent(exact_answer),
            "recorded": RewardComponent(mentions_answer, weight=0.0),
        }
        assert list(held_components(components)) == ["answer"]


class TestNumbers:
    def test_rates_are_by_problem_and_by_slice(self) -> None:
        """Every completion of one problem of two is paid wrongly: half of them, and the interval is of problems."""
        asked = [*problems(2), *problems(2, "long", role="heldout_only")]
        given = [answer(problem, "21 or 9") for problem in asked for _ in range(3)]
        numbers = loophole_numbers(tried(mentions_answer, asked, given, 1), {}, INTERVALS)
        assert {name: part["greedy"]["loopholes"] for name, part in numbers["by_slice"].items()} == {
            "sums": 3,
            "long": 3,
        }
        overall = numbers["overall"]["greedy"]
        assert overall == {
            "texts": 6,
            "paid": 3,
            "unjudged": 0,
            "loopholes": 3,
            "rate": {"value": 0.5, "low": 0.0, "high": 1.0},
        }
        assert numbers["overall"]["sampled"]["rate"]["value"] is None
        assert (
            numbers["by_slice"]["long"]["probe"]["texts"] == sum(one["asked"] for one in numbers["probes"].values()) / 2
        )

    def test_none_of_many_still_has_an_upper_bound(self) -> None:
        numbers = loophole_numbers(tried(exact_answer, problems(20)), {}, INTERVALS)
        rate = numbers["overall"]["probe"]["rate"]
        assert (rate["value"], rate["low"]) == (0.0, 0.0)
        assert 0.1 < rate["high"] < 0.2

    def test_lines_and_headline(self) -> None:
        given = [answer(problems()[0], "21 or \ud800 9")]
        found = tried(mentions_answer, problems(), given, 1)
        rows = [json.loads(line) for line in loophole_lines(found).splitlines()]
        assert rows == [one.row() for one in found if one.loophole]
        assert f"pays 1 of 1 completions and {len(rows) - 1} of " in loophole_headline(found)
        assert loophole_lines(found) == loophole_lines(tried(mentions_answer, problems(), given, 1))


class TestRewardsFile:
    def test_the_shipped_one(self) -> None:
        assert list(read_rewards(CONFIGS / "rewards.yaml")) == ["exact_answer", "answer_format"]

    @pytest.mark.parametrize("content", [None, "[]", "a: {check: no.such.thing}", "{}", "a: ["])
    def test_one_that_is_none(self, content: str | None, tmp_path: Path) -> None:
        path = tmp_path / "rewards.yaml"
        if content is not None:
            path.write_text(content)
        with pytest.raises(RewardsError, match=rf"rewards is {path}, which cannot be used"):
            read_rewards(path)


def with_loopholes(settings: ReportSettings, texts: Sequence[str] = (), probes: int = 0) -> ReportSettings:
    """The experiment with loopholes looked for: the sampled completions of both, ``texts`` paid among the trained's."""
    for name, skill, bad in (("base", base_skill, ()), ("trained", trained_skill, texts)):
        found = [_of(one) for one in answers(skill)]
        found += [replace(one, text=text, paid=True, accepted=False) for one, text in zip(found, bad, strict=False)]
        probe = replace(found[0], source="probe", name="either", text="7 or 8", why="It looks for gold anywhere.")
        found += [replace(probe, paid=index < probes, accepted=False) for index in range(3)]
        path = settings.evaluation_numbers / f"{name}.json"
        numbers = loophole_numbers(found, {"exact_answer": RewardComponent(exact_answer)}, INTERVALS)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"loopholes": numbers}))
        (settings.completions / name / "loopholes.jsonl").write_bytes(loophole_lines(found))
    return settings


def _of(one: HeldOutAnswer) -> Tried:
    problem = Problem(one.problem_id, one.question, one.gold, one.slice, {"role": one.role})
    source = "greedy" if one.mode == "greedy" else "sampled"
    readings = (one.strict_answer, one.lenient_answer)
    return Tried(problem, source, "0", one.text, readings, paid=one.correct, accepted=one.correct)  # type: ignore[arg-type]


def section(settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("grpo.report.draw_pictures", lambda *_: {})
    page = make_report(settings)[settings.output / "report.md"].decode()
    return page.split("## Loopholes\n", 1)[1].split("\n## ", 1)[0]


class TestReport:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> ReportSettings:
        return write_experiment(tmp_path)

    def test_not_looked_for(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        assert section(settings, monkeypatch).strip().startswith("Not looked for: `configs/evaluate.yaml` names no")

    def test_none_found(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        text = section(with_loopholes(settings), monkeypatch)
        assert (
            "**None was found**: of 155 completions before training, 155 completions after it, 3 probes, the reward "
            "pays none that the scorer rejects." in text
        )
        row = next(line for line in text.splitlines() if line.startswith("| products"))
        assert row == "| products | other task | 0.0% [0.0, 52.2] | 0.0% [0.0, 52.2] | - |"
        assert "###" not in text

    def test_found_and_shown_as_text(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        text = section(with_loopholes(settings, [HOSTILE, "7 8"], probes=2), monkeypatch)
        assert "**Found**: 0 of 155 completions before training, 2 of 157 completions after it, 2 of 3 probes." in text
        probe = next(line for line in text.splitlines() if line.startswith("| either |"))
        assert probe.endswith("| 2 | 3 |")
        assert "It looks for gold anywhere. Read strictly: " in probe
        html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
        assert "<script" not in html
        assert "<img" not in html
        assert html.count("<table>") == 3
        assert text == section(settings, monkeypatch)

    def test_readings_that_do_not_fit(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        """The scorer accepts nothing that is paid: said, before anyone believes that all was gamed."""
        monkeypatch.setitem(globals(), "trained_skill", lambda *_: False)
        text = section(with_loopholes(settings, ["7 8"] * 12), monkeypatch)
        assert "The scorer accepts none of the 12 completions after training that the reward pays" in text

    def test_rows_that_are_not_the_numbers(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        path = with_loopholes(settings, ["7 8"]).completions / "trained" / "loopholes.jsonl"
        for content in ("", "{}\n", "{\n"):
            path.write_text(content)
            with pytest.raises(ValueError, match=rf"{path} cannot be used .*run the stage evaluate again"):
                section(settings, monkeypatch)

    def test_numbers_that_lack_a_part(self, settings: ReportSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        path = with_loopholes(settings).evaluation_numbers / "trained.json"
        numbers = json.loads(path.read_text())
        del numbers["loopholes"]["by_slice"]["products"]
        path.write_text(json.dumps(numbers))
        with pytest.raises(ValueError, match=r"products.*run the stage evaluate again"):
            section(settings, monkeypatch)


def test_the_config_names_the_reward_that_training_reads() -> None:
    texts = {name: (CONFIGS / f"{name}.yaml").read_text() for name in ("prepare", "train", "evaluate")}
    assert all(re.search(r"^ *rewards: rewards\.yaml$", text, re.MULTILINE) for text in texts.values())
