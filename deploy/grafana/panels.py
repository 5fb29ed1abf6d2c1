"""Panels of the dashboard: queries and units by the kind and the name of a metric.

A counter is shown as its rate, a gauge as its value, a histogram as two quantiles, a summary as its
mean, an info as a table. Units follow from the suffix that Prometheus prescribes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.grafana.catalogue import EVERY_SERVICE, MetricFamily

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = (0.5, 0.99)
# Every driver exports it, leader or not.
LEADER = "megascale_leader"
# A driver that has lost the leadership still exports the steps that it recorded.
_FROM_THE_LEADER = f'and on (instance) ({LEADER}{{cluster="$cluster"}} == 1)'
# Suffix of a gauge, histogram or summary, and Grafana's name of the unit.
_UNITS = {"_seconds": "s", "_bytes": "bytes", "_ratio": "percentunit"}
# The same for the rate of a counter. CPU seconds per second are cores.
_RATE_UNITS = {"_seconds_total": "none", "_bytes_total": "Bps", "": "cps"}


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the name of a series of its result in the legend."""

    expression: str
    legend: str


def panel_of(family: MetricFamily) -> dict[str, Any]:
    """The panel of one metric, without id and place."""
    description = f"{family.kind} {family.name}"
    if family.labels:
        description += f" by {', '.join(family.labels)}"
    title = family.help.rstrip(".")
    if family.kind == "info":
        return table(title, description, queries_of(family), hidden=("__name__", "job"))
    return time_series(title, description, unit_of(family), queries_of(family))


def unit_of(family: MetricFamily) -> str:
    """Grafana's name of the unit in which the panel shows the metric."""
    if family.kind == "counter":
        return rate_unit_of(family.name)
    return next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "none")


def rate_unit_of(name: str) -> str:
    """The same for the rate of a counter."""
    return next(unit for end, unit in _RATE_UNITS.items() if name.endswith(end))


def queries_of(family: MetricFamily) -> list[Query]:
    """The queries of a metric's panel."""
    by = _grouping(family)
    series, legend = _selector(family), " ".join(f"{{{{{label}}}}}" for label in by)

    def rate(suffix: str = "", extra: Sequence[str] = ()) -> str:
        inner = f"rate({family.name}{suffix}{series}[$__rate_interval])"
        return _aggregate("sum", inner, (*extra, *by))

    match family.kind:
        case "counter":
            return [Query(rate(), legend or family.service)]
        case "histogram":
            return [
                Query(
                    f"histogram_quantile({quantile:g}, {rate('_bucket', ['le'])})",
                    f"p{quantile * 100:g} {legend}".strip(),
                )
                for quantile in QUANTILES
            ]
        case "summary":
            return [Query(f"{rate('_sum')} / {rate('_count')}", legend or family.service)]
        case "info":
            return [Query(f"{family.name}{series}", "")]
    value = f"{family.name}{series}"
    # A start time is shown as an age. Only the leader's gauges are current, of all drivers'.
    if family.name.endswith("_start_time_seconds"):
        value = f"time() - {value}"
    elif family.service == "driver" and family.name != LEADER:
        value = f"{value} {_FROM_THE_LEADER}"
    return [Query(_aggregate("max", value, by), legend or family.service)]


def time_series(
    title: str, description: str, unit: str, queries: Sequence[Query]
) -> dict[str, Any]:
    """Lines over time."""
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": {"fillOpacity": 5, "showPoints": "auto"}},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(queries)
        ],
    }


def table(
    title: str, description: str, queries: Sequence[Query], hidden: Sequence[str]
) -> dict[str, Any]:
    """A table of the present labels of the series, without the ``hidden`` ones."""
    panel = time_series(title, description, "none", queries)
    for target in panel["targets"]:
        target |= {"instant": True, "range": False, "format": "table"}
    columns = dict.fromkeys(("Time", "Value", *hidden), True)
    return panel | {
        "type": "table",
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {},
        "transformations": [{"id": "organize", "options": {"excludeByName": columns}}],
    }


def _grouping(family: MetricFamily) -> tuple[str, ...]:
    if family.name == LEADER:
        return ("instance",)
    if family.service == EVERY_SERVICE:
        return ("service", "node", "instance")
    # A driver runs on no node; the label `node` of its metrics is part of the metric.
    return family.labels if family.service == "driver" else ("node", *family.labels)


def _selector(family: MetricFamily) -> str:
    chosen = ['cluster="$cluster"']
    by = _grouping(family) if family.service != EVERY_SERVICE else ()
    chosen += [f'{label}=~"${label}"' for label in ("job", "node") if label in by]
    return "{" + ", ".join(chosen) + "}"


def _aggregate(operator: str, inner: str, by: Sequence[str]) -> str:
    return f"{operator} by ({', '.join(by)}) ({inner})" if by else f"{operator}({inner})"
