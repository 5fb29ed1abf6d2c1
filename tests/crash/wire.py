"""A relay between two daemons that breaks their connections: cut, refused, or with a flipped bit.

Real sockets on both sides; one thread per direction. Faults are armed one at a time and hit the
next connection; several in a row are refused.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass

CUT, FLIP_ON_THE_WAY, REFUSED = "cut", "flip on the way", "connections refused"


@dataclass(slots=True)
class WireFault:
    """What hits byte ``at`` of one direction of a connection."""

    kind: str
    forth: bool
    at: int


class Wire:
    """Listens at ``endpoint`` and relays to ``target``."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault: WireFault | None = None
        self.refused = 0  # so many connections from now on
        self.hits: list[WireFault] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        # A shutdown wakes the thread that waits in accept; close alone does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self.refused:
                self.refused -= 1
                self.hits.append(WireFault(REFUSED, forth=True, at=0))
                near.close()
                continue
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:
                near.close()
                continue
            fault, self.fault = self.fault, None
            for source, sink, forth in ((near, far, True), (far, near, False)):
                own = fault if fault is not None and fault.forth is forth else None
                threading.Thread(target=self._relay, args=(source, sink, own), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, fault: WireFault | None) -> None:
        passed = 0
        try:
            while data := bytearray(source.recv(1 << 16)):
                if fault is not None and passed <= fault.at < passed + len(data):
                    self.hits.append(fault)
                    if fault.kind == CUT:
                        sink.sendall(data[: fault.at - passed])
                        break
                    data[fault.at - passed] ^= 1
                passed += len(data)
                sink.sendall(data)
        except OSError:
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
