"""A real driver alerts by a webhook and sends decisions as spans; its metrics count both."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from tests.harness import otlp
from tests.harness.driver import DriverProcess
from tests.harness.etcd import etcd_server
from tests.harness.waiting import CALL_TIMEOUT_S, eventually
from tests.harness.webhook import WebhookServer

from megascale.v1 import driver_pb2
from megascale_common.etcd.server import EtcdServer

__all__ = ["etcd_server"]  # a fixture


async def test_a_driver_that_leads_says_so(tmp_path: Path, etcd_server: EtcdServer) -> None:
    server = WebhookServer(lambda number: (200, {}))
    secret = tmp_path / "hook"
    secret.write_text(server.url)
    receiver = otlp.Receiver()
    options = ("--alert-webhook", f"@{secret}", "--alert-severity", "info")
    options += ("--otlp-endpoint", receiver.url)
    driver = DriverProcess(tmp_path, etcd_server.endpoint, None, "driver", *options)
    try:
        await driver.start()
        await eventually(lambda: server.bodies, "the alert", story=driver.log)
        (body,) = server.bodies
        assert body["title"].startswith("LEADER_ELECTED: ") and body["cluster"] == "test"
        address = driver.metrics_file.read_text().strip()

        def counted() -> bool:
            url = f"http://{address}/metrics"
            text = urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S).read().decode()
            sent = 'megascale_decision_spans_total{outcome="sent"} 1.0' in text
            return sent and 'megascale_alerts_total{outcome="sent"} 1.0' in text

        await eventually(counted, "the count", story=driver.log)
        assert "a-secret-path" not in driver.log()

        # The span of the decision, under the id that the event has.
        (span,) = receiver.spans
        (event,) = (await driver.stub.ListEvents(driver_pb2.ListEventsRequest())).events
        assert (span.name, span.trace_id.hex()) == ("LEADER_ELECTED", event.trace_id)
        assert otlp.attributes(span)["message"] == event.message
    finally:
        await driver.close()
        server.close()
        receiver.close()
