"""A webhook on this machine, which answers as a test tells it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from typing import Any

# The status and headers of an answer, by the number of the request (from 1).
Answer = Callable[[int], tuple[int, dict[str, str]]]


class WebhookServer:
    """A webhook that answers as it is told, by the number of the request."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.asked = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.asked += 1
                data = self.rfile.read(int(self.headers["Content-Length"]))
                code, headers = answer(outer.asked)
                if code == 200:
                    outer.bodies.append(json.loads(data))
                self.send_response(code)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/a-secret-path"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
