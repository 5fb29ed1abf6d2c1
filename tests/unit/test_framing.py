"""Messages survive any split of the byte stream, descriptors arrive, bad input is refused."""

from __future__ import annotations

import os
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_common.node import framing

messages = st.lists(
    st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20), max_size=4),
    max_size=5,
)


@given(messages, st.integers(1, 7))
def test_decoder_does_not_depend_on_how_bytes_are_split(
    sent: list[framing.Message], size: int
) -> None:
    data = b"".join(framing.encode(message) for message in sent)
    decoder = framing.Decoder()
    received = [
        message for i in range(0, len(data), size) for message in decoder.feed(data[i : i + size])
    ]
    assert received == sent


def test_descriptors_travel_beside_a_message() -> None:
    left, right = socket.socketpair()
    read, write = os.pipe()
    with left, right:
        framing.send(left, {"kind": "fork", "rank": 3}, [write])
        answer = framing.receive(right)
        assert answer is not None
        message, descriptors = answer
        assert message == {"kind": "fork", "rank": 3}
        os.write(descriptors[0], b"x")
        assert os.read(read, 1) == b"x"
        for descriptor in (*descriptors, read, write):
            os.close(descriptor)
        left.close()
        assert framing.receive(right) is None


def test_refuses_oversized_truncated_and_foreign_messages() -> None:
    with pytest.raises(framing.FramingError, match="limit"):
        framing.encode({"kind": "x", "data": "a" * framing.MAX_MESSAGE_BYTES})
    with pytest.raises(framing.FramingError, match="limit"):
        framing.Decoder().feed(struct.pack("<I", framing.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(framing.FramingError, match="not JSON"):
        framing.Decoder().feed(struct.pack("<I", 3) + b"abc")
    with pytest.raises(framing.FramingError, match="object"):
        framing.Decoder().feed(struct.pack("<I", 2) + b"[]")
    left, right = socket.socketpair()
    with left, right:
        left.sendall(framing.encode({"kind": "x"})[:-1])
        left.close()
        with pytest.raises(framing.FramingError, match="middle"):
            framing.receive(right)
