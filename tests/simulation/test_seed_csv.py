"""The CSV of many seeds: written line by line, continued after a cut, refused for another setup."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.simulation.__main__ import main, summary
from tests.simulation.seed_csv import COLUMNS, SeedCsv, percentile
from tests.simulation.shell.run import Result, Setup

SETUP = Setup(0, nodes=16, days=0.1)


def ended(seed: int, broken: str = "") -> Result:
    """The result of a seed that has ended."""
    return Result(
        seed, broken=broken, digest=f"d{seed}", ettr=0.5, recoveries=2, false_evictions=1,
        detected_s=[3.25, 0.5], node_days=1.6, cpu_s=1.5, fault_count=7,
    )  # fmt: skip


def test_each_seed_is_in_the_file_as_soon_as_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "seeds.csv"
    file = SeedCsv(str(path), SETUP)
    for count, seed in enumerate((4, 1), 1):
        file.add(ended(seed))
        assert len(path.read_text().splitlines()) == 1 + count
    again = SeedCsv(str(path), SETUP)
    assert list(again.known) == [4, 1]
    assert summary([again.known[4]]) == summary([ended(4)])


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "seeds.csv"
    file = SeedCsv(str(path), SETUP)
    file.add(ended(0, "I9 at 3 s: a, b"))
    file.add(ended(1))
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("d1") + 2])
    again = SeedCsv(str(path), SETUP)
    assert list(again.known) == [0] and again.known[0].broken == "I9 at 3 s: a, b"
    again.add(ended(1))
    assert path.read_text() == whole


def test_seeds_of_another_setup_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "seeds.csv"
    SeedCsv(str(path), SETUP).add(ended(0))
    with pytest.raises(ValueError, match=r"nodes 16.*name another file"):
        SeedCsv(str(path), Setup(0, nodes=12, days=0.1))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert main(["--nodes", "12", "--days", "0.1", "--csv", str(path)]) == 2
    assert "name another file" in capsys.readouterr().err
    path.write_text("seed,digest\n1,2\n")
    with pytest.raises(ValueError, match="name another"):
        SeedCsv(str(path), SETUP)


def test_seeds_in_the_file_are_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.simulation.shell import fleet

    ran: list[int] = []

    def run_all(setups: list[Setup], jobs: int) -> list[Result]:
        ran.extend(setup.seed for setup in setups)
        return [ended(setup.seed) for setup in setups]

    monkeypatch.setattr(fleet, "run_all", run_all)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    arguments = ["--nodes", "16", "--days", "0.1", "--csv", str(tmp_path / "seeds.csv")]
    assert main([*arguments, "--seeds", "2"]) == 0
    assert main([*arguments, "--seeds", "4"]) == 0
    assert ran == [0, 1, 2, 3]
    last = capsys.readouterr().out.splitlines()[-1]
    assert '"seeds": 4' in last and '"recoveries": 8' in last


def test_percentiles_are_by_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert percentile([], 0.5) == 0.0 and len(COLUMNS) == len(set(COLUMNS))
