"""NCCL's settings for a cluster: right for the release, with a reason each, compared on a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_planner.network.profile import (
    FLAP_MARGIN,
    BadProfile,
    Site,
    card_settings,
    differences,
    render,
    timeout_s,
)

SITE = Site(nccl=(2, 27), cards=("mlx5_0", "mlx5_1"), traffic_class=106)


def values(site: Site) -> dict[str, str]:
    return {setting.name: setting.value for setting in render(site)}


def test_a_timeout_is_the_documented_one() -> None:
    documented = {14: 0.47, 17: 3.8, 18: 7.5, 19: 15, 20: 30, 21: 60, 22: 120}
    for exponent, seconds in documented.items():
        assert timeout_s(exponent) == pytest.approx(seconds, rel=0.02)


@given(st.floats(0.01, 60), st.floats(1, 600), st.floats(1, 600))
def test_nccl_outlasts_a_flap_and_gives_up_before_the_job_is_ended(
    flap_s: float, watchdog_s: float, hang_floor_s: float
) -> None:
    site = replace(SITE, flap_s=flap_s, watchdog_s=watchdog_s, hang_floor_s=hang_floor_s)
    try:
        exponent = int(values(site)["NCCL_IB_TIMEOUT"])
    except BadProfile as error:
        assert "raise it" in str(error)
        return
    assert FLAP_MARGIN * flap_s < timeout_s(exponent) < min(watchdog_s, hang_floor_s)
    assert timeout_s(exponent - 1) <= FLAP_MARGIN * flap_s  # the shortest that does


def test_what_a_release_has() -> None:
    assert values(SITE)["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"
    old = {setting.name: setting for setting in render(replace(SITE, nccl=(2, 18)))}
    new = {setting.name: setting for setting in render(replace(SITE, nccl=(2, 30)))}
    assert (old["NCCL_IB_TIMEOUT"].default, new["NCCL_IB_TIMEOUT"].default) == ("18", "20")
    assert old["NCCL_IB_SPLIT_DATA_ON_QPS"].default == "1"
    assert not {"NCCL_IB_RETURN_ASYNC_EVENTS", "NCCL_RAS_ENABLE", "NCCL_IB_FIFO_TC"} & old.keys()
    assert {"NCCL_IB_RETURN_ASYNC_EVENTS", "NCCL_RAS_ENABLE", "NCCL_IB_FIFO_TC"} <= new.keys()
    assert "NCCL_IB_MERGE_NICS" in values(replace(SITE, nccl=(2, 30), split_ports=True))
    infiniband = values(replace(SITE, fabric="infiniband"))
    assert "NCCL_IB_GID_INDEX" not in infiniband
    assert card_settings(replace(SITE, fabric="infiniband")) == []
    assert "mlxreg -d mlx5_1 " in card_settings(SITE)[1].query
    assert all(setting.reason for setting in new.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cards": ()}, "--nics"),
        ({"nccl": (2, 9)}, "--nccl 2.9"),
        ({"queue_pairs": 129}, "--qps 129"),
        ({"traffic_class": 256}, "--traffic-class 256"),
        ({"flap_s": 120.0}, "repaired"),
        ({"flap_s": 40.0}, "--hang-floor-s 60"),
        ({"watchdog_s": 5.0}, "--watchdog-s 5"),
        ({"flap_s": float("nan")}, "--flap-s nan"),
    ],
)
def test_what_cannot_be_is_refused_with_its_option(change: dict[str, object], says: str) -> None:
    with pytest.raises(BadProfile, match=says):
        render(replace(SITE, **change))  # type: ignore[arg-type]


def test_an_unset_variable_whose_default_is_wanted_is_no_difference() -> None:
    wanted = render(SITE)
    everything = {setting.name: setting.value for setting in wanted}
    assert differences(wanted, everything) == []
    del everything["NCCL_IB_RETRY_CNT"]  # 7 is the default
    everything["NCCL_IB_TC"] = "0"
    apart = differences(wanted, everything)
    assert [(setting.name, value) for setting, value in apart] == [("NCCL_IB_TC", "0")]


def test_the_commands_render_and_compare(tmp_path: Path) -> None:
    runner = CliRunner()
    line = ["net", "render", "--nics", "mlx5_0", "--traffic-class", "106"]
    shown = runner.invoke(build_app(), [*line, "--json"])
    assert shown.exit_code == 0, shown.output
    rendered = json.loads(shown.stdout)
    assert rendered["cards"][0]["name"] == "roce_adp_retrans_en"
    file = tmp_path / "nccl.env"
    file.write_text(runner.invoke(build_app(), [*line, "--env"]).stdout)
    names = [entry["name"] for entry in rendered["settings"]]
    lines = dict(text.split("=", 1) for text in file.read_text().splitlines())
    assert list(lines) == names

    # A process that has it all, and one with another traffic class.
    for change, status in ({}, 0), ({"NCCL_IB_TC": "3"}, 1):
        sleeper = [sys.executable, "-c", "print(flush=True); input()"]
        environment = {**os.environ, **lines, **change}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(sleeper, env=environment, **pipes) as process:  # type: ignore[call-overload]
            process.stdout.readline()
            command = ["net", "verify", str(file), "--pid", str(process.pid), "--json"]
            found = runner.invoke(build_app(), command)
            process.communicate(b"\n")
        assert found.exit_code == status, found.output
        answer = json.loads(found.stdout.splitlines()[-1])
        assert answer["holds"] == (status == 0)
        wanted = [{"name": "NCCL_IB_TC", "wanted": "106", "found": "3"}] if status else []
        assert answer["differences"] == wanted


def test_usage(tmp_path: Path) -> None:
    runner = CliRunner()
    bad = tmp_path / "bad"
    bad.write_text("NCCL IB\n")
    for line in (
        ["net", "render", "--nccl", "two", "--nics", "a"],
        ["net", "render", "--fabric", "token-ring", "--nics", "a"],
        ["net", "verify", str(tmp_path / "none")],
        ["net", "verify", str(bad)],
    ):
        assert runner.invoke(build_app(), line).exit_code == 2, line
