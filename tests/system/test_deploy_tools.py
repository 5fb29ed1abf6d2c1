"""deploy/ validated by promtool, amtool and systemd-analyze.

`make test-system` fetches them where it can; a test whose tool is absent is skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.harness.deployment import (
    INSTALLED,
    PROMETHEUS,
    PYTHON,
    REPOSITORY,
    SYSTEMD,
    filled,
    panel_queries,
)

pytestmark = pytest.mark.system

# systemd's measure of how open a service is to what it runs, from 0 (closed) to 100. The node's
# workers need devices and storage.
MOST_EXPOSURE = {
    "megascale-driver.service": 20,
    "megascale-targets.service": 20,
    "megascale-node@.service": 50,
}


def run(tool: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a tool; skips the test where there is none."""
    program = shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not on PATH")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_promtool_accepts_configuration_and_rules() -> None:
    status, output = run("promtool", "check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert status == 0, output
    assert "2 rule files found" in output
    for name in ("recording.rules.yml", "alerts.rules.yml"):
        status, output = run("promtool", "check", "rules", "--lint-fatal", str(PROMETHEUS / name))
        assert status == 0, output


def test_alerts_fire_when_they_should_and_only_then() -> None:
    status, output = run("promtool", "test", "rules", str(PROMETHEUS / "alerts.test.yml"))
    assert status == 0, output


ALERTMANAGER = PROMETHEUS / "alertmanager.yml"


def test_amtool_accepts_the_example_for_alertmanager() -> None:
    status, output = run("amtool", "check-config", str(ALERTMANAGER))
    assert status == 0, output


@pytest.mark.parametrize(
    ("severity", "receiver"), [("critical", "on-call"), ("warning", "channel")]
)
def test_alertmanager_sends_an_alert_by_its_severity(severity: str, receiver: str) -> None:
    status, output = run(
        "amtool",
        "config",
        "routes",
        "test",
        f"--config.file={ALERTMANAGER}",
        f"--verify.receivers={receiver}",
        f"severity={severity}",
        "cluster=prod",
        "job=demo",
    )
    assert status == 0, output


def test_an_alert_that_never_fires_fails_its_test(tmp_path: Path) -> None:
    for path in PROMETHEUS.glob("*.yml"):
        shutil.copy(path, tmp_path)
    path = tmp_path / "alerts.rules.yml"
    whole = yaml.safe_load(path.read_text())
    for group in whole["groups"]:
        for rule in group["rules"]:
            kept = rule["expr"]
            rule["expr"] = "vector(0) > 0"
            path.write_text(yaml.safe_dump(whole))
            rule["expr"] = kept
            status, output = run("promtool", "test", "rules", str(tmp_path / "alerts.test.yml"))
            assert status == 1, (rule["alert"], output)


def test_promtool_accepts_what_the_panels_ask(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": filled(query, "main")}
        for number, query in enumerate(panel_queries())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    status, output = run("promtool", "check", "rules", str(path))
    assert status == 0, output
    assert f"{len(rules)} rules found" in output


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units as if the project were installed where this one is, run by this interpreter."""
    paths = []
    for path in sorted(SYSTEMD.glob("megascale-*")):
        text = path.read_text().replace(PYTHON, sys.executable)
        paths.append(tmp_path / path.name)
        paths[-1].write_text(text.replace(INSTALLED, str(REPOSITORY)))
    return paths


def test_systemd_accepts_the_units(units: list[Path]) -> None:
    _, output = run("systemd-analyze", "verify", *map(str, units))
    # Lines, not the status: an unknown setting is only a warning, and the host's own units, which
    # are loaded too, may have errors.
    assert [line for line in output.splitlines() if "megascale" in line] == []


@pytest.mark.parametrize(
    ("wrong", "reported"), [("Restart=often", "often"), ("MemoryLimits=1G", "MemoryLimits")]
)
def test_systemd_refuses_a_unit_with_a_wrong_setting(
    units: list[Path], wrong: str, reported: str
) -> None:
    (node,) = [path for path in units if "node" in path.name]
    node.write_text(node.read_text().replace("Restart=always", wrong))
    _, output = run("systemd-analyze", "verify", str(node))
    assert reported in output


def test_services_are_closed_to_what_they_do_not_need(units: list[Path]) -> None:
    _, version = run("systemd-analyze", "--version")
    if int(version.split()[1]) < 250:
        pytest.skip("systemd-analyze security --offline came with systemd 250")
    for unit in units:
        if unit.suffix == ".service":
            most = f"--threshold={MOST_EXPOSURE[unit.name]}"
            status, output = run(
                "systemd-analyze", "security", "--offline=true", "--no-pager", most, str(unit)
            )
            assert status == 0, output
