"""The driver's options for alerts, and what they open."""

from __future__ import annotations

import argparse
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from megascale_common.service.errors import OptionError
from megascale_driver.alerting.grouping import Groups
from megascale_driver.alerting.messages import FORMATS
from megascale_driver.alerting.sender import Alerts, Webhook
from megascale_driver.core.values.reasons import ALERTS, SEVERITIES

MAX_WEBHOOKS = 16  # each has a queue and a task


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--alert-webhook`` and what goes with it."""
    add = parser.add_argument_group("alerts").add_argument
    add(
        "--alert-webhook",
        action="append",
        default=[],
        metavar="URL",
        help="POST alerts there; @FILE reads the URL from a file, since other users of this "
        "machine see command lines; may be repeated",
    )
    add("--alert-format", choices=FORMATS, default="json", help="of the body; default json")
    add(
        "--alert-severity",
        choices=SEVERITIES,
        default="warning",
        help="alert from this severity on; default warning",
    )
    add(
        "--alert-silence",
        action="append",
        default=[],
        metavar="REASON[,REASON...]",
        help="never alert for these reasons of the audit log; may be repeated",
    )


def opened(options: argparse.Namespace, cluster: str, now_s: Callable[[], float]) -> Alerts:
    """What the options ask for; without a webhook nobody is alerted.

    Raises:
        OptionError: a URL, a file or a reason cannot be used.
    """
    silenced = [reason for part in options.alert_silence for reason in part.split(",")]
    if unknown := sorted(set(silenced) - set(ALERTS)):
        known = ", ".join(sorted(ALERTS))
        raise OptionError(f"--alert-silence {unknown[0]}: no reason that alerts; known: {known}")
    if len(options.alert_webhook) > MAX_WEBHOOKS:
        raise OptionError(f"--alert-webhook: give {MAX_WEBHOOKS} at most")
    urls = [_url(text) for text in options.alert_webhook]
    webhooks = [Webhook(url, cluster, options.alert_format) for url in urls]
    return Alerts(webhooks, Groups(options.alert_severity, silenced), now_s)


def _url(text: str) -> str:
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text().strip()
        except OSError as error:
            problem = f"--alert-webhook {text}: {error.strerror}; give a file with a URL"
            raise OptionError(problem) from None
    parts = urllib.parse.urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError("--alert-webhook: give a URL that begins with https:// or http://")
    return text
