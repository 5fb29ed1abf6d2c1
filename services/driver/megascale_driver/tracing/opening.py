"""The driver's option ``--otlp-endpoint``, and what it opens."""

from __future__ import annotations

import argparse
import os
import socket
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING

from megascale.v1 import types_pb2
from megascale_common.service.errors import OptionError
from megascale_common.service.start import build_version

if TYPE_CHECKING:
    from megascale_driver.tracing.exporter import DecisionSpans

EXPORT_TIMEOUT_S = 10  # of a batch, with the exporter's own repetitions
_EXTRA = "pip install 'megascale[otel]', or leave the option out"


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--otlp-endpoint``."""
    parser.add_argument_group("traces").add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="send each decision as a span there by OTLP over gRPC, such as http://127.0.0.1:4317 "
        "(extra otel); https:// for TLS; OTEL_EXPORTER_OTLP_HEADERS and _CERTIFICATE are honoured; "
        "default: none are sent",
    )


def opened(
    options: argparse.Namespace, epoch: Callable[[], types_pb2.Epoch | None]
) -> DecisionSpans | None:
    """What the option asks for; None without it. ``epoch``: of the present term.

    Raises:
        OptionError: a package is missing, or the URL cannot be used.
    """
    url: str = options.otlp_endpoint
    if not url:
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port
    except ValueError:
        usable = None
    if not usable:
        raise OptionError(f"--otlp-endpoint {url}: give http://HOST:PORT or https://HOST:PORT")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        from megascale_driver.tracing.exporter import DecisionSpans
    except ImportError as error:
        raise OptionError(f"--otlp-endpoint needs OpenTelemetry ({error.name}): {_EXTRA}") from None
    exporter = OTLPSpanExporter(
        endpoint=url, insecure=parts.scheme == "http", timeout=EXPORT_TIMEOUT_S
    )
    resource = {
        "service.name": "megascale-driver",
        "service.namespace": options.cluster,
        "service.version": build_version(),
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    return DecisionSpans(exporter, resource, epoch)
