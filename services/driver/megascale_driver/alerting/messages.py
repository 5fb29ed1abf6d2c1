"""An alert as the body of a request: generic JSON, or what Slack and its likes take."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final, Literal, get_args

from megascale_driver.alerting.grouping import Alert
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.reasons import severity_of

Format = Literal["json", "slack"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_SIGNS: Final = {
    "critical": ":red_circle:",
    "warning": ":large_yellow_circle:",
    "info": ":white_circle:",
}


def body(alert: Alert, cluster: str, form: Format) -> bytes:
    """The request's body, JSON in UTF-8."""
    content = _generic(alert, cluster) if form == "json" else _slack(alert, cluster)
    return json.dumps(content).encode()


def _generic(alert: Alert, cluster: str) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "severity": alert.severity,
        "title": alert.title,
        "job": alert.job,
        "attempt": alert.attempt,
        "more": alert.more,
        "lines": [_line(line) for line in alert.lines],
        "next": _next(alert),
    }


def _line(line: Audit) -> dict[str, Any]:
    at = datetime.fromtimestamp(line.at_s, UTC).isoformat(timespec="milliseconds")
    return {
        "time": at,
        "reason": line.reason,
        "severity": severity_of(line.reason),
        "subject": line.subject,
        "message": line.message,
        "outcome": line.outcome,
    }


def _next(alert: Alert) -> str:
    """The command that shows more."""
    if alert.job:
        return f"megascale explain {alert.job}"
    kind, _, name = alert.lines[0].subject.partition("/")
    return f"megascale events --node {name}" if kind == "nodes" else "megascale events"


def _slack(alert: Alert, cluster: str) -> dict[str, Any]:
    place = f", job {alert.job} attempt {alert.attempt}" if alert.job else ""
    lines = [f"{_SIGNS[alert.severity]} *{_plain(alert.title)}*", f"cluster {cluster}{place}"]
    lines += [f"• {line.reason} {line.subject}: {_plain(line.message)}" for line in alert.lines[1:]]
    if alert.more:
        lines.append(f"and {alert.more} more")
    return {"text": "\n".join([*lines, f"`{_next(alert)}`"])}


def _plain(text: str) -> str:
    """Without what Slack would read as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
