"""Structured logs of the services on stderr: one JSON object per event, a line on a terminal.

A log call never raises and never waits for long. A line that cannot be written is dropped, and the
next one that can be written reports how many were (:mod:`megascale_common.node.output`).
"""

from __future__ import annotations

import json as json_text
import logging
import sys
from datetime import UTC, datetime

from megascale_common.node.output import steady_streams

# structlog imports rich to format tracebacks on a terminal, which takes a fifth of the processor
# time of a service's start. Tracebacks are plain text here (format_exc_info), so rich is hidden
# from it.
if "rich" in sys.modules:
    import structlog
else:
    sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        del sys.modules["rich"]

# For commands, which never configure logs and print only their result on stdout, and for services
# until they do. The stream is looked up for each line, because it can be replaced.
structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def configure(service: str, *, level: str = "info", json: bool | None = None) -> None:
    """Set up structlog and the standard streams of a process.

    ``json`` None means JSON unless stderr is a terminal.
    """
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise ValueError(f"log level {level!r} is not one of debug, info, warning, error")
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )

    def dropped(count: int, why: str) -> str:
        fields = {"service": service, "event": "log lines were dropped", "count": count}
        fields |= {"reason": why, "level": "warning", "timestamp": datetime.now(UTC).isoformat()}
        return json_text.dumps(fields) if as_json else " ".join(map(str, fields.values()))

    steady_streams(dropped)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """Logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(component=name)
    return logger
