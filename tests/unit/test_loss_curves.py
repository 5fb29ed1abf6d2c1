"""Loss curves of the benchmarks: studies and their jobs, comparisons by tokens, pictures, CSV."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks import ablation, compare_losses, convergence
from benchmarks.convergence_curves import read_curve, rows_of, table
from benchmarks.convergence_studies import STUDIES, Sizes, job_of
from benchmarks.loss_plot import Curve, draw

from megascale_job.config import JobConfig, validate

SIZES = Sizes(steps=1000, layers=3, hidden=64, head_size=16, sequence=32, batch=8)


def curve(losses: list[float], tokens_a_step: int = 100) -> Curve:
    """Steps of equal size."""
    return Curve(tokens_a_step * np.arange(1.0, len(losses) + 1), np.array(losses))


def job(study: str, run: str) -> JobConfig:
    return job_of(STUDIES[study], STUDIES[study].runs[run], SIZES, 1, "/corpus")


@pytest.mark.parametrize("study", STUDIES)
def test_every_run_of_a_study_is_a_job_over_the_same_tokens(study: str) -> None:
    assert STUDIES[study].noise in STUDIES[study].runs
    for run in STUDIES[study].runs:
        config = job(study, run)
        assert not validate(config), run
        assert config.training.steps * config.training.global_batch_size == 8000
        assert config.training.seed == config.data.seed == 1


def test_a_larger_batch_follows_the_rule_of_the_product() -> None:
    small, large = job("lamb", "LAMB 0.0025"), job("lamb", "LAMB 0.005, 4 times the batch")
    assert (large.training.steps, large.training.global_batch_size) == (250, 32)
    assert large.training.micro_batch_size == 32
    assert large.optimizer.learning_rate == 2 * small.optimizer.learning_rate == 0.005
    assert large.schedule == small.schedule and small.schedule.warmup_steps == 20
    assert {config.optimizer.name for config in (small, large)} == {"lamb"}


def test_names_tell_the_rates_and_noise_changes_only_the_rounding() -> None:
    for run in STUDIES["lamb"].runs:
        optimizer, words = job("lamb", run).optimizer, run.replace(",", "").split()
        assert optimizer.name == words[0].lower()
        assert optimizer.learning_rate == pytest.approx(float(words[1]), rel=2e-6)
    first, noise = job("lamb", "AdamW 0.001"), job("lamb", STUDIES["lamb"].noise)
    rates = [np.float32(config.optimizer.learning_rate) for config in (first, noise)]
    assert rates[0] != rates[1], "the kernels' float32"
    assert first.training == noise.training and first.data == noise.data


def test_runs_are_compared_up_to_the_tokens_that_both_have_read() -> None:
    # The second run was cut off at 400 of 1000 tokens; it ends 0.5 above the first there.
    first = curve([float(loss) for loss in range(20, 0, -1)], 50)
    cut = curve([12.0, 11.0, 10.0, 13.5])
    rows = rows_of({"a": {1: first}, "b": {1: cut}}, "a", "none")
    assert [row["last_tenth"] for row in rows] == [1.5, 13.5]
    assert rows[1]["difference"] == 13.5 - 13.0 and rows[1]["tokens"] == 400
    assert rows[1]["max_step_difference"] is None, "steps of other sizes"
    assert rows[1]["within_noise"] is None
    back = rows_of({"a": {1: first}, "b": {1: cut}}, "b", "none")[0]
    assert back["difference"] == 13.0 - 13.5 and back["tokens"] == 400


def test_a_difference_is_held_against_the_largest_noise_of_a_seed() -> None:
    def ends(*losses: float) -> dict[int, Curve]:
        return {seed: curve([5.0, loss]) for seed, loss in enumerate(losses)}

    curves = {"a": ends(1, 2, 3), "noise": ends(1.1, 1.8, 3), "b": ends(1.3, 2, 3.2)}
    curves |= {"c": ends(1.3, 2.1, 3.4), "d": ends(0, 1, 2), "e": {7: curve([1.0, 1.0])}}
    rows = {row["run"]: row for row in rows_of(curves, "a", "noise")}
    assert rows["noise"]["differences"] == pytest.approx([0.1, -0.2, 0])
    assert rows["b"]["difference"] == pytest.approx(0.5 / 3)
    assert rows["b"]["standard_error"] == pytest.approx(np.std([0.3, 0, 0.2], ddof=1) / 3**0.5)
    within = {name: row["within_noise"] for name, row in rows.items()}
    assert within == {"a": True, "noise": True, "b": True, "c": False, "d": True, "e": None}
    assert rows["b"]["max_step_difference"] == pytest.approx(0.3)
    assert rows["e"]["difference"] is None and rows["e"]["differences"] == []
    lines = table(list(rows.values())).splitlines()
    assert len(lines) == 8 and len({line.count("|") for line in lines}) == 1
    assert "| b | 2 | 0.0 | 1.3000, 2.0000, 3.2000 | +0.16667 |" in lines[4]


def test_runs_that_only_read_are_compared_batch_by_batch() -> None:
    """None learns, so each batch is a pair of its own; learning is the last tenth's difference."""
    curves = {"a": {1: curve([1, 9, 2]), 2: curve([4, 4, 4])}, "empty": {3: curve([1.0])}}
    curves["b"] = {1: curve([1.3, 9.1, 2.2]), 2: curve([4.1, 4.3, 4.2, 7])}  # one more
    rows = {row["run"]: row for row in rows_of(curves, "a", "a", evaluated=True)}
    assert rows["b"]["loss_by_seed"] == pytest.approx([4.2, 4.9])
    assert rows["b"]["differences"] == pytest.approx([0.2, 0.2])
    assert rows["b"]["difference"] == pytest.approx(0.2)
    spread = np.std([0.3, 0.1, 0.2, 0.1, 0.3, 0.2], ddof=1)
    assert rows["b"]["standard_error"] == pytest.approx(spread / 6**0.5)
    assert rows["b"]["within_noise"] is False and rows["a"]["within_noise"] is True
    assert rows["empty"]["difference"] is rows["empty"]["standard_error"] is None
    assert "| b | 3 | 0.0 | 4.2000, 4.9000 | +0.20000 |" in table(list(rows.values()))


def test_bins_are_means_of_whole_intervals() -> None:
    edges = np.array([0.0, 200.0, 400.0, 600.0])
    assert curve([4, 2, 3, 1, 9]).binned(edges).tolist()[:2] == [3, 2]
    assert math.isnan(curve([4, 2, 3, 1, 9]).binned(edges)[2]), "ends within the interval"
    found = curve([7, 5], 300).binned(edges)
    assert math.isnan(found[0]) and found[1:].tolist() == [7, 5]


def test_a_file_of_a_run_that_was_cut_off_before_its_first_step_is_no_curve(
    tmp_path: Path,
) -> None:
    path = tmp_path / "curve.jsonl"
    path.write_text("")
    assert read_curve(path) is None
    path.write_text(json.dumps({"step": 1, "tokens": 64, "loss": 2.5}) + "\n")
    found = read_curve(path)
    assert found is not None and found.end(found.length) == 2.5


def test_a_picture_has_its_figures_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = {seed: curve([float(4 + seed)] * 8 + [3.0] * 8, 50) for seed in (1, 2)}
    large = {1: curve([4.5] * 2 + [3.5] * 2, 200), 2: curve([6.5] * 2, 200)}
    draw({"small": small, "large": large}, "small", tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "x.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "large"]
    assert [row["tokens"] for row in rows] == ["100", "300"], "up to where both seeds came"
    assert [float(row["mean_loss"]) for row in rows] == [5.5, 5.5]
    assert [float(row["lowest_difference"]) for row in rows] == [-0.5, -0.5]
    assert [float(row["highest_difference"]) for row in rows] == [0.5, 0.5]


def test_a_picture_of_runs_that_go_on_begins_where_they_do(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tokens = np.array([700.0, 800.0, 900.0])
    own = {1: Curve(tokens, np.array([3.0, 2.0, 1.0]))}
    draw({"own": own, "other": own}, "own", tmp_path / "x.png")
    rows = list(csv.DictReader((tmp_path / "x.csv").open()))
    found = [(row["tokens"], float(row["mean_loss"])) for row in rows if row["run"] == "other"]
    assert found == [("650", 3.0), ("750", 2.0), ("850", 1.0)]


def test_losses_stand_beside_their_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name, losses in {"plain": [3, 2], "sums": [3.1, 2], "over": [3.1, 2.2]}.items():
        lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses, 1)]
        (tmp_path / name).write_text("\n".join(lines))
    paths = [str(tmp_path / name) for name in ("plain", "over")]
    options = ["--noise", str(tmp_path / "sums"), "--plot", str(tmp_path / "x.png")]
    assert compare_losses.main([*paths, *options, "--tolerance", "0.25"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["noise"][0]["mean_difference"] == pytest.approx(0.05)
    assert found["comparisons"][0]["times_noise"] == pytest.approx(3)
    assert found["comparisons"][0]["end_difference"] == pytest.approx(0.2)
    assert {row["run"] for row in csv.DictReader((tmp_path / "x.csv").open())} == {
        "plain", "sums", "over",
    }  # fmt: skip
    assert compare_losses.main([paths[0], paths[0], "--noise", paths[0]]) == 0
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["times_noise"] is None


def test_losses_of_several_seeds_are_compared_seed_by_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    runs = {"plain-1": [3, 2], "over-1": [3, 2.5], "plain-2": [5, 4], "over-2": [5, 3.5]}
    for name, losses in runs.items():
        lines = [json.dumps({"step": n, "loss": loss}) for n, loss in enumerate(losses, 1)]
        (tmp_path / name).write_text("\n".join(lines))
    paths = [str(tmp_path / name) for name in ("plain-{seed}", "over-{seed}")]
    options = ["--seeds", "1,2", "--plot", str(tmp_path / "x.png")]
    assert compare_losses.main([*paths, *options, "--tolerance", "0.6"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"]
    assert [one["end_difference"] for one in found] == pytest.approx([0.5, -0.5])
    with (tmp_path / "x.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == "over"]
    assert float(rows[-1]["mean_loss"]) == pytest.approx(3)
    assert compare_losses.main([*paths, "--seeds", "1,3"]) == 2, "seed 3 has no files"


@pytest.mark.parametrize("known", [True, False], ids=["MFU", "CPU"])
def test_rows_of_an_ablation_stand_beside_the_papers(known: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gain = {"median": 0.05, "min": 0.04, "max": 0.06, "pairs": 5}
    rows = [
        {"label": label, "tokens_per_s_per_device": speed, "gain_over_previous": gain}
        | {"mfu_full": speed / 100 if known else None}
        | {"mfu_causal": speed / 110 if known else None}
        for label, speed in (("baseline", 40.0), ("+ kernels", 42.0), ("+ something", 41.0))
    ]
    del rows[0]["gain_over_previous"]
    cells = ablation.cells_of(rows)
    assert [cell["points"] for cell in cells] == (
        [None, pytest.approx(2), pytest.approx(-1)] if known else [None] * 3
    )
    assert [cell["paper_points"] for cell in cells] == [None, 1.7, None]
    ablation.draw(cells, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "a.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["row"] for row in written] == ["baseline", "+ kernels", "+ something"]
    assert written[1]["gain_median"] == "0.05" and written[0]["gain_median"] == ""


def test_an_ablation_of_before_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figures = {"tokens_per_s_per_device": 40.0, "mfu_full": 0.4, "mfu_causal": 0.38}
    rows = [{"label": "baseline", **figures}, {"label": "+ kernels", **figures, "mfu_full": 0.43}]
    results, picture = tmp_path / "a.jsonl", tmp_path / "a.png"
    results.write_text(json.dumps({"name": "7b", "failed": "no memory"}) + "\n")
    assert ablation.main(["--read", str(results), "--plot", str(picture)]) == 1
    assert "no measured rows" in capsys.readouterr().err and not picture.exists()
    results.write_text(json.dumps({"name": "7b", "variants": rows}) + "\n")
    assert ablation.main(["--read", str(results), "--plot", str(picture)]) == 0
    written = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert float(written[1]["points"]) == pytest.approx(3) and picture.exists()
    assert ablation.main(["--read", str(results)]) == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    options = ["--study", "lamb", "--folder", str(tmp_path / "out"), "--plot", "x.png"]
    assert convergence.main(options) == 2
    assert "matplotlib" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert ablation.main(["--device", "cpu", "--plot", "x.png"]) == 2
    assert "--read" in capsys.readouterr().err
    assert convergence.main([*options[:4], "--against", "SGD"]) == 2
    assert "AdamW 0.0005" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--study", "fp8", "--steps", "8", "--branch-at", "8"), "give a step from 1 to 7"),
        (("--study", "fp8", "--stop-after", "9", "--branch-at", "9"), "give a step from 1 to 8"),
        (("--study", "lamb", "--branch-at", "8"), "leave it out with --runs"),
        (("--study", "fp8", "--evaluate", "4"), "give --branch-at, that many before step 600"),
        (
            ("--study", "fp8", "--steps", "9", "--branch-at", "6", "--evaluate", "4"),
            "give --branch-at, that many before step 9",
        ),
    ],
)
def test_a_branch_that_cannot_be_is_refused(
    options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convergence.main([*options, "--folder", str(tmp_path / "out")]) == 2
    assert text in capsys.readouterr().err and not (tmp_path / "out").exists()
