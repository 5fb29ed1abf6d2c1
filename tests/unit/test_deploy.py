"""deploy/: units that the real commands accept, rules and panels over metrics that the code has."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from deploy.grafana import generate, panels
from deploy.grafana.catalogue import MetricFamily, families
from deploy.prometheus import write_targets
from tests.harness import deployment
from tests.harness.deployment import PROMETHEUS, SYSTEMD, command_line, metric_names, read_unit
from tests.harness.snippets import RUNBOOK

from megascale_driver.__main__ import _parser as driver_parser
from megascale_driver.core.values.cluster import Disposition, Liveness
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.reasons import REASONS, SEVERITIES
from megascale_driver.platform.local.node import (
    DRIVER_FILE,
    NODE_FILES,
    TARGETS_FILE,
)
from megascale_executor.agent.__main__ import config_from
from megascale_executor.agent.__main__ import parser as agent_parser

pytestmark = pytest.mark.check

ALERTS = deployment.rules("alerts.rules.yml")
RECORDED = deployment.rules("recording.rules.yml")


def environment(*names: str) -> dict[str, str]:
    """The variables of the example files."""
    found: dict[str, str] = {}
    for name in names:
        found |= deployment.read_environment((SYSTEMD / name).read_text())
    return found


@pytest.mark.parametrize(
    ("unit", "program", "parser", "files"),
    [
        ("megascale-driver.service", ["-m", "megascale_driver"], driver_parser(), []),
        (
            "megascale-node@.service",
            ["-m", "megascale_executor.agent"],
            agent_parser(),
            ["node.env.example"],
        ),
        (
            "megascale-targets.service",
            [f"{deployment.INSTALLED}/deploy/prometheus/write_targets.py"],
            write_targets.parser(),
            [],
        ),
    ],
)
def test_the_real_command_accepts_what_a_unit_gives_it(
    unit: str, program: list[str], parser: argparse.ArgumentParser, files: list[str]
) -> None:
    found = read_unit((SYSTEMD / unit).read_text())
    words = command_line(found, environment("megascale.env.example", *files), "n1")
    assert words[0] == deployment.PYTHON
    assert words[1 : 1 + len(program)] == program
    names = {word for word in words if word.startswith("--")}
    assert names <= set(re.findall(r"--[a-z-]+", parser.format_help())), (
        "the beginning of an option only"
    )
    options = parser.parse_args(words[1 + len(program) :])
    assert options.cluster == "main"
    if unit == "megascale-node@.service":
        config = config_from(options)
        assert (config.node, config.devices) == ("n1", tuple(range(8)))
        assert config.host == "127.0.0.1", "without TLS the agent stays on loopback"
        assert config.address_file.parent == config.node_folder
    with pytest.raises(SystemExit):  # a made-up option is found
        parser.parse_args([*words[1 + len(program) :], "--made-up"])


def test_the_example_settings_are_those_that_the_units_use() -> None:
    units = [read_unit(path.read_text()) for path in SYSTEMD.glob("*.service")]
    used = set().union(*(deployment.variables(unit) for unit in units))
    assert used == set(environment("megascale.env.example", "node.env.example"))


def test_a_unit_splits_variables_as_systemd_does() -> None:
    unit = read_unit("[Service]\n# no\nExecStart=run --a ${A} \\\n  --n %i \\\n  $B\nX=1\nX=2\n")
    assert unit["Service"]["X"] == ["1", "2"]
    full = command_line(unit, {"A": "x y", "B": "p q"}, "n1")
    assert full == ["run", "--a", "x y", "--n", "n1", "p", "q"]
    assert command_line(unit, {"A": "", "B": ""}, "n1") == ["run", "--a", "", "--n", "n1"]
    with pytest.raises(KeyError):
        command_line(unit, {"A": ""}, "n1")


def test_a_node_ends_in_order_and_may_lock_memory() -> None:
    service = read_unit((SYSTEMD / "megascale-node@.service").read_text())["Service"]
    wanted = {
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "LimitMEMLOCK": "infinity",
        "Restart": "always",
    }
    assert {name: service[name] for name in wanted} == {
        name: [value] for name, value in wanted.items()
    }


def test_targets_of_a_run_folder_are_written(tmp_path: Path) -> None:
    (node := tmp_path / "nodes" / "n1").mkdir(parents=True)
    (tmp_path / DRIVER_FILE).write_text("127.0.0.1:1\n")
    for name in NODE_FILES.values():
        (node / name).write_text("127.0.0.1:2\n")
    write_targets.main(["--cluster", "main", "--run-folder", str(tmp_path)])
    groups = json.loads((tmp_path / TARGETS_FILE).read_text())
    assert {(g["labels"]["service"], g["labels"].get("node")) for g in groups} == {
        ("driver", None),
        ("executor", "n1"),
        ("checkpoint", "n1"),
    }
    assert {group["labels"]["cluster"] for group in groups} == {"main"}


def test_prometheus_reads_the_targets_and_keeps_the_label_job() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert all((PROMETHEUS / name).is_file() for name in config["rule_files"])
    (scrape,) = config["scrape_configs"]
    assert scrape["honor_labels"] is True
    (discovery,) = scrape["file_sd_configs"]
    assert discovery["files"] == [f"{deployment.RUN_FOLDER}/{TARGETS_FILE}"]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (cluster) (rate(a_total{job="b"}[5m])) > 0.5', {"a_total"}),
        ("a:b:c and on (x, y) (d == 1) unless e offset 15m", {"a:b:c", "d", "e"}),
        ("0 * group by (le) (up) or abs(f) == +Inf", {"up", "f"}),
        ("histogram_quantile(0.5, g_bucket) # not h", {"g_bucket"}),
    ],
)
def test_names_of_metrics_are_found_in_promql(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names


def test_every_metric_that_a_rule_or_a_panel_names_is_defined() -> None:
    defined = {name for family in families() for name in family.sample_names}
    unknown = {name: who for name, who in deployment.named_metrics().items() if name not in defined}
    assert not unknown


def test_rules_select_on_values_that_the_code_has() -> None:
    values: Mapping[str, set[str]] = {
        "reason": set(REASONS),
        "severity": {*SEVERITIES, "none"},
        "phase": {phase.lower() for phase in JobPhase},
        "liveness": {liveness.lower() for liveness in Liveness},
        "disposition": {disposition.lower() for disposition in Disposition},
        "service": {"driver", *NODE_FILES},
    }
    for rule in (*RECORDED, *ALERTS):
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', rule["expr"]):
            assert set(value.split("|")) <= values[label], rule


def test_recording_rules_are_named_by_labels_metric_and_operation() -> None:
    names = [rule["record"] for rule in RECORDED]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z_]+:megascale_[a-z_]+:[a-z0-9]+", name) for name in names)
    used = {name for rule in ALERTS for name in metric_names(rule["expr"])}
    shown = {name for query in deployment.panel_queries() for name in metric_names(query)}
    assert set(names) <= used | shown


def anchors(page: str) -> set[str]:
    """Anchors of the headings of a page."""
    headings = re.findall(r"(?m)^#+ (.*)$", (deployment.REPOSITORY / page).read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, object]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Megascale[A-Za-z]+", str(rule["alert"]))
    assert re.fullmatch(r"\d+[smh]", str(rule["for"]))
    assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    annotations = rule["annotations"]
    assert isinstance(annotations, dict)
    assert set(annotations) == {"summary", "description", "runbook"}
    page, _, anchor = annotations["runbook"].partition("#")
    assert page.removeprefix("docs/") in RUNBOOK
    assert anchor in anchors(page)


def test_alertmanager_groups_by_job_and_names_alerts_and_reasons_that_there_are() -> None:
    found = yaml.safe_load((PROMETHEUS / "alertmanager.yml").read_text())
    assert found["route"]["group_by"] == ["cluster", "job"]
    receivers = {each["name"] for each in found["receivers"]}
    assert {
        found["route"]["receiver"],
        *(r["receiver"] for r in found["route"]["routes"]),
    } == receivers
    known = {"alertname": {rule["alert"] for rule in ALERTS}, "reason": set(REASONS)}
    for rule in found["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            ((label, names),) = re.findall(r'^(\w+)(?:!=|=~|=)"(.*)"$', matcher)
            assert set(names.split("|")) <= known[label]


def test_every_alert_is_seen_firing_by_its_test() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names))
    firing: set[str] = set()
    for test in yaml.safe_load((PROMETHEUS / "alerts.test.yml").read_text())["tests"]:
        for sample in (s for case in test["promql_expr_test"] for s in case["exp_samples"]):
            firing |= set(re.findall(r'alertname="(\w+)", alertstate="firing"', sample["labels"]))
        firing |= {
            case["alertname"] for case in test.get("alert_rule_test", ()) if case["exp_alerts"]
        }
    assert firing == set(names)


def test_the_dashboard_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_dashboard_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "DASHBOARD", tmp_path / "dashboard.json")
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
    generate.DASHBOARD.write_text(generate.DASHBOARD.read_text().replace("megascale_loss", "x"))
    assert generate.main(["--check"]) == 1
    assert "make dashboard" in capsys.readouterr().err


def test_the_dashboard_shows_every_metric_in_its_place() -> None:
    shown = {name for query in deployment.panel_queries() for name in metric_names(query)}
    assert all(shown & set(family.sample_names) for family in families())
    found = list(deployment.panels())
    assert len({panel["id"] for panel in found}) == len(found)
    places = [panel["gridPos"] for panel in json.loads(deployment.DASHBOARD.read_text())["panels"]]
    cells = [
        (place["x"] + x, place["y"] + y)
        for place in places
        for x in range(place["w"])
        for y in range(place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels lie on each other"
    assert max(x for x, _ in cells) < 24


def made(name: str, kind: str, *labels: str, service: str = "executor") -> MetricFamily:
    return MetricFamily(service, name, kind, "What it is.", labels)


@pytest.mark.parametrize(
    ("family", "unit", "expressions", "legend"),
    [
        (
            made("m_a_bytes_total", "counter", "way"),
            "Bps",
            ["sum by (node, way) (rate(m_a_bytes_total{C, N}[R]))"],
            "{{node}} {{way}}",
        ),
        (
            made("m_b_total", "counter"),
            "cps",
            ["sum by (node) (rate(m_b_total{C, N}[R]))"],
            "{{node}}",
        ),
        (
            made("m_c_ratio", "gauge", "job"),
            "percentunit",
            ["max by (node, job) (m_c_ratio{C, J, N})"],
            "{{node}} {{job}}",
        ),
        (
            made("m_d", "gauge", "job", service="driver"),
            "none",
            ["max by (job) (m_d{C, J} and on (instance) (megascale_leader{C} == 1))"],
            "{{job}}",
        ),
        (
            made("m_e_seconds", "histogram", service="driver"),
            "s",
            [
                "histogram_quantile(0.5, sum by (le) (rate(m_e_seconds_bucket{C}[R])))",
                "histogram_quantile(0.99, sum by (le) (rate(m_e_seconds_bucket{C}[R])))",
            ],
            "p50",
        ),
        (
            made("m_f_seconds", "summary"),
            "s",
            [
                "sum by (node) (rate(m_f_seconds_sum{C, N}[R]))"
                " / sum by (node) (rate(m_f_seconds_count{C, N}[R]))"
            ],
            "{{node}}",
        ),
    ],
    ids=lambda value: value.name if isinstance(value, MetricFamily) else "",
)
def test_a_panel_suits_the_kind_and_the_unit_of_its_metric(
    family: MetricFamily, unit: str, expressions: list[str], legend: str
) -> None:
    panel = panels.panel_of(family)
    short = {
        'cluster="$cluster"': "C",
        'job=~"$job"': "J",
        'node=~"$node"': "N",
        "$__rate_interval": "R",
    }
    found = [target["expr"] for target in panel["targets"]]
    for long, letter in short.items():
        found = [expression.replace(long, letter) for expression in found]
    assert found == expressions
    assert panel["fieldConfig"]["defaults"]["unit"] == unit
    assert panel["targets"][0]["legendFormat"] == legend
    assert panel["title"] == "What it is"
