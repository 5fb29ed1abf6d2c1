"""Rows against peers: both sides run the same model and batch, and the table has their ratio."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from benchmarks.options import entry_of, to_arguments
from benchmarks.peers import bar, best, pair
from benchmarks.presets import job

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
ROWS = [
    row for devices in (2, 4, 8) for row in json.loads((PEERS / f"rows-{devices}.json").read_text())
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['name']}")
def test_both_sides_of_a_row_have_the_same_model_and_batch(
    row: pair.Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = pair.command(row, "bar", 10, Path("results"))[2:]
    module = importlib.import_module(f"benchmarks.peers.{row['bar']}")
    lines: list[dict[str, object]] = []
    monkeypatch.setattr(bar, "report", lambda line, _: lines.append(line))
    monkeypatch.setattr("sys.argv", [row["bar"], *words, "--dry-run", str(row["devices"])])
    module.main()
    [theirs] = lines
    for options in row["ours"].values():
        run = entry_of(to_arguments({**row["shape"], "steps": 10, **options})).run
        ours = job(run, row["devices"], cuda=True)
        assert run.kernels == "triton"
        assert {axis for axis in ("tp", "pp", "dp") if getattr(ours.parallelism, axis) > 1} == set(
            run.overlap
        )
        shape = bar.describe(ours, bar.parser(None).parse_args(["--preset", run.preset]))
        # A bar runs at its own best micro-batch and virtual stages; `best.py` found them.
        own = (
            {"micro_batch_size", "vpp"} if {"micro_batch", "vpp"} & set(row["bar_options"]) else ()
        )
        assert {key: theirs[key] for key in shape if key not in own} == {
            key: value for key, value in shape.items() if key not in own
        }
        llama = row["bar"] == "torchtitan"
        assert (ours.model.mlp, ours.model.norm) == (
            ("swiglu", "rmsnorm") if llama else ("gelu", "layernorm")
        )
        assert ours.model.bias != llama
        if llama:
            assert ours.model.ffn_width == bar.swiglu(ours, 256).model.ffn_width


def test_a_row_that_cannot_run_and_rows_that_cannot_be_read_end_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = bar.parser(None).parse_args(["--preset", "7b", "--tp", "3"])
    with pytest.raises(SystemExit) as refused:
        bar.job_of(options, 8)
    assert refused.value.code == 2
    assert "is not the 8 ranks" in capsys.readouterr().err
    assert pair.main(["--rows", str(tmp_path / "none.json")]) == 2


def test_a_layer_of_swiglu_has_nearly_the_weights_of_ours() -> None:
    ours = job(entry_of(["--preset", "7b"]).run, 1, cuda=True)
    theirs = bar.swiglu(ours, 256)
    assert theirs.model.ffn_width == 11008
    assert 3 * theirs.model.ffn_width == pytest.approx(2 * ours.model.ffn_width, rel=0.01)


def test_a_ratio_is_reported_pair_by_pair() -> None:
    def line(side: str, number: int, speed: float) -> dict[str, object]:
        figures = {"tokens_per_s_per_device": speed, "mfu_causal": speed / 200}
        return {"row": "7b", "side": side, "round": number, **figures}

    lines = [
        line("bar", 0, 100.0),
        line("ours", 0, 110.0),
        line("bar", 1, 100.0),
        line("ours", 1, 120.0),
    ]
    lines += [line("bar", 2, 500.0), {"row": "7b", "side": "ours", "round": 2, "failed": "no room"}]
    lines += [
        line("second", 0, 50.0),
        {"row": "30b", "side": "bar", "round": 0, "failed": "no room"},
    ]
    lines.append({"row": "30b", "side": "ours", "round": 0, "failed": "no room"})
    assert pair.table(lines).splitlines()[2:] == [
        "| 7b: ours | 100 | 115 | 50.0%, 57.5% | 1.150 (1.100 to 1.200, 2 pairs) |",
        "| 7b: second | 100 | 50 | 50.0%, 25.0% | 0.500 (0.500 to 0.500, 1 pairs) |",
        "| 30b: ours | no pair | | | |",
    ]


def test_the_fastest_setting_of_a_bar_is_kept_and_failures_lose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"tensorwise": 100.0, "delayed": 120.0}

    def turn(row: pair.Row, side: str, *_: object) -> dict[str, dict[str, object]]:
        options = row["bar_options"]
        if "micro_batch" in options:
            return {side: {"failed": "no room"}}
        return {side: {"tokens_per_s_per_device": speeds[options["fp8"]], "memory_gib": 60.0}}

    monkeypatch.setattr(pair, "turn", turn)
    settings = [{"fp8": "tensorwise"}, {"fp8": "delayed"}, {"fp8": "delayed", "micro_batch": 8}]
    row = {"devices": 2, "bar": "megatron_te", "shape": {}, "bar_options": {}, "ours": {}}
    rows = [{"name": "a", **row, "bar_settings": settings}, {"name": "b", **row}]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    assert best.main(["--rows", str(file), "--write"]) == 0
    assert [row["bar_options"] for row in json.loads(file.read_text())] == [{"fp8": "delayed"}, {}]
    assert json.loads(capsys.readouterr().out)["winners"] == {"a": {"fp8": "delayed"}}
    rows[0]["bar_settings"] = settings[2:]
    file.write_text(json.dumps(rows))
    assert best.main(["--rows", str(file), "--write"]) == 1
    assert json.loads(file.read_text()) == rows
    assert best.main(["--rows", str(file), "--only", "b"]) == 2
