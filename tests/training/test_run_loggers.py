import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import WandbLogger

from grpo.training.run_loggers import RoundCSVLogger, RoundLineLogger, WandbSettings, run_loggers

LOCAL = [RoundCSVLogger, RoundLineLogger]  # pytest's output is no terminal


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_round_has_one_row_whole_after_every_call(tmp_path: Path) -> None:
    logger = RoundCSVLogger(tmp_path)
    logger.log_metrics({"reward/mean": 0.5}, step=0)
    assert rows(tmp_path) == [{"round": "0", "reward/mean": "0.5"}]
    logger.log_metrics({"validation/reward/mean": 0.25}, step=0)
    logger.log_metrics({"reward/mean": 0.75}, step=1)
    assert rows(tmp_path) == [
        {"round": "0", "reward/mean": "0.5", "validation/reward/mean": "0.25"},
        {"round": "1", "reward/mean": "0.75", "validation/reward/mean": ""},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_run_that_goes_back_replaces_the_rounds_it_runs_again(tmp_path: Path) -> None:
    first = RoundCSVLogger(tmp_path)
    for number in range(6):
        first.log_metrics({"reward/mean": float(number), "loss/kl": 1.0}, step=number)
    resumed = RoundCSVLogger(tmp_path)
    for number in range(3, 8):
        resumed.log_metrics({"reward/mean": 10.0 + number}, step=number)
    assert [int(row["round"]) for row in rows(tmp_path)] == list(range(8))
    assert [float(row["reward/mean"]) for row in rows(tmp_path)] == [0, 1, 2, 13, 14, 15, 16, 17]
    # nothing of the old round 3 is left either
    assert [row["loss/kl"] for row in rows(tmp_path)] == ["1.0"] * 3 + [""] * 5


def test_metrics_without_a_round_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step is None"):
        RoundCSVLogger(tmp_path).log_metrics({"reward/mean": 0.5})


def test_the_table_is_written_whatever_becomes_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert [type(logger) for logger in run_loggers(tmp_path, "id", WandbSettings("online"))] == LOCAL
    monkeypatch.delenv("WANDB_MODE")
    assert [type(logger) for logger in run_loggers(tmp_path, "id", WandbSettings("disabled"))] == LOCAL


def test_each_run_gets_a_wandb_run_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name in ("one", "two"):
        *_, wandb = run_loggers(tmp_path / name, name, WandbSettings("offline", project="p", group="g"))
        assert wandb.version == name
        assert wandb.save_dir == str(tmp_path / name)


@pytest.mark.parametrize(("mode", "offline"), [("offline", True), ("dryrun", True), ("online", False)])
def test_the_environment_decides_whether_wandb_is_sent_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, offline: bool
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    *_, wandb = run_loggers(tmp_path, "id", WandbSettings("disabled"))
    assert isinstance(wandb, WandbLogger)
    assert wandb._offline is offline
    assert wandb._wandb_init["resume"] == (None if offline else "allow")


def test_a_log_file_gets_a_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    RoundLineLogger().log_metrics({"reward/mean": 0.48125, "groups/mixed": 0.5, "seconds/round": 12.21, "x": 1}, 3)
    assert capsys.readouterr().out == "round 3: reward 0.481, mixed 0.5, seconds 12.2\n"
