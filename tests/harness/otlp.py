"""A receiver of OpenTelemetry spans (OTLP over gRPC) in the test's process."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, in the order of arrival."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.url = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        """Take a batch."""
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        """End it."""
        self._server.stop(0).wait()


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a message, without our prefix."""
    return {
        each.key.removeprefix("megascale."): getattr(
            each.value, each.value.WhichOneof("value") or "string_value"
        )
        for each in holder.attributes
    }
