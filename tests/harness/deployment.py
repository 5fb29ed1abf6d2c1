"""What deploy/ holds, as tests read it: units as systemd expands them, rules and panels."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
SYSTEMD = REPOSITORY / "deploy" / "systemd"
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "megascale.json"
# Where the units expect the project, its interpreter and the cluster's folder.
INSTALLED = "/opt/megascale"
PYTHON = f"{INSTALLED}/.venv/bin/python"
RUN_FOLDER = "/var/lib/megascale"
# Series that Prometheus makes itself.
BUILT_IN = {"up", "ALERTS"}
# Words of PromQL that are neither functions nor names of metrics.
_KEYWORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "Inf", "NaN"}

Unit = dict[str, dict[str, list[str]]]


def read_unit(text: str) -> Unit:
    """Values by section and name; a name may stand several times."""
    unit: Unit = {}
    section: dict[str, list[str]] = {}
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^[#;].*\n", "", text))
    for line in filter(None, map(str.strip, joined.splitlines())):
        if line.startswith("["):
            section = unit.setdefault(line.strip("[]"), {})
        else:
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return unit


def read_environment(text: str) -> dict[str, str]:
    """Variables of a file for EnvironmentFile=."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def variables(unit: Unit) -> set[str]:
    """Names of the variables that the unit's command uses."""
    return set(re.findall(r"\$\{?(\w+)", unit["Service"]["ExecStart"][0]))


def command_line(unit: Unit, environment: Mapping[str, str], instance: str = "") -> list[str]:
    """ExecStart as systemd runs it: ${X} is one word, $X as many as it holds, %i the instance.

    Raises:
        KeyError: a variable that the environment does not define.
    """
    words: list[str] = []
    for word in shlex.split(unit["Service"]["ExecStart"][0].replace("%i", instance)):
        if whole := re.fullmatch(r"\$(\w+)", word):
            words += environment[whole[1]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: environment[found[1]], word))
    return words


def rules(name: str) -> list[dict[str, Any]]:
    """All rules of a file in deploy/prometheus."""
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    """The dashboard's panels, those in folded rows too."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def panel_queries() -> list[str]:
    """What the panels ask, with Grafana's variables."""
    return [target["expr"] for panel in panels() for target in panel.get("targets", ())]


def filled(query: str, cluster: str, interval: str = "5m") -> str:
    """A panel's query for all jobs and nodes of one cluster."""
    for variable, value in (
        ("$cluster", cluster),
        ("$job", ".*"),
        ("$node", ".*"),
        ("$__rate_interval", interval),
    ):
        query = query.replace(variable, value)
    return query


def named_metrics() -> dict[str, set[str]]:
    """Every series that a rule, a panel or a variable of the dashboard names, and who names it.

    Without those that recording rules or Prometheus itself make.
    """
    recording, alerts = rules("recording.rules.yml"), rules("alerts.rules.yml")
    named = {rule["record"]: rule["expr"] for rule in recording}
    named |= {rule["alert"]: rule["expr"] for rule in alerts}
    named |= {f"panel {query}": query for query in panel_queries()}
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    for variable in variables:
        if variable["type"] == "query":
            series = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
            assert series, variable
            named[f"variable {variable['name']}"] = series[1]
    made = BUILT_IN | {rule["record"] for rule in recording}
    found: dict[str, set[str]] = {}
    for who, expression in named.items():
        for name in metric_names(expression) - made:
            found.setdefault(name, set()).add(who)
    return found


def metric_names(expression: str) -> set[str]:
    """Names of the series that a PromQL expression reads."""
    text = re.sub(r"(?m)#.*$", " ", re.sub(r'"[^"]*"', " ", expression))
    text = re.sub(r"\{[^}]*\}|\[[^]]*\]", " ", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", text)
    words = re.findall(r"(?<![\w:.])[A-Za-z_:][\w:]*(?![\w:])(?!\s*\()", text)
    return set(words) - _KEYWORDS


def served_names(page: str) -> set[str]:
    """Names of the series that a page of /metrics has, or will have once there is a sample."""
    parts = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    return {
        name + part
        for name, kind in re.findall(r"(?m)^# TYPE (\S+) (\w+)$", page)
        for part in parts.get(kind, ("",))
    }
