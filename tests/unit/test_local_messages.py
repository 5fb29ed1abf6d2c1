"""Messages between the processes of a node: checked on arrival, and readable across builds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megascale_common.node import framing
from megascale_common.node.messages import (
    Accepted,
    Acquire,
    Exited,
    MemoryState,
    ReplicaOrders,
    Running,
    Seal,
    SelfChecked,
    SelfCheckResult,
    Stay,
    StepDone,
    Verified,
)

DAEMON = Accepted("the checkpoint daemon", Acquire, Seal)


def passed_on(message: Any) -> Any:
    """The message as its reader gets it."""
    return framing.Decoder().feed(framing.encode(message))[0]


def test_the_wire_has_the_names_and_values_that_it_had_as_dictionaries() -> None:
    result = SelfCheckResult(
        name="compute", target="cpu:0", verdict="PASS", detail="", elapsed_s=0.5
    )
    assert framing.encode(SelfChecked(rank=1, results=[result]))[4:] == (
        b'{"kind":"self_checked","rank":1,"results":[{"name":"compute","target":"cpu:0",'
        b'"verdict":"PASS","detail":"","elapsed_s":0.5}]}'
    )
    assert framing.encode(Stay())[4:] == b'{"kind":"stay"}'
    assert passed_on(Running(step=3)) == {"kind": "running", "step": 3}
    assert passed_on(ReplicaOrders(target="a:1", source="", bytes_per_s=0)) == {
        "target": "a:1",
        "source": "",
        "bytes_per_s": 0,
    }


def test_what_an_older_build_leaves_out_has_its_default_and_what_a_newer_one_adds_is_ignored() -> (
    None
):
    old = {"kind": "seal", "slot": 0, "step": 5, "small_state": {}, "finite": True}
    read = DAEMON.read({**old, "of_a_newer_build": 1})
    assert read == Seal(slot=0, step=5, small_state={}, finite=True, persist=True, replicate=False)
    assert Accepted("the agent", Exited).read({"kind": "exited", "pid": 1, "status": 0}) == Exited(
        pid=1, status=0, peak_bytes=0
    )
    worker = Accepted("a worker", MemoryState, Verified)
    verified = worker.read({"kind": "verified", "problem": "", "file": ""})
    assert verified == Verified(problem="", file="", small_state={}, fetched_bytes=0)


def test_a_diverged_loss_and_the_name_of_any_file_survive() -> None:
    record = {"loss": math.nan, "norm": math.inf, "why": "/data/\udcff.bin"}
    message = passed_on(StepDone(record=record))
    read = Accepted("the agent", StepDone).read(message)
    assert math.isnan(read.record["loss"]) and read.record["norm"] == math.inf
    assert read.record["why"] == record["why"]
    assert json.loads(framing.encode(StepDone(record=record))[4:])["kind"] == "step"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"kind": "acquire"}, "acquire.step is None; it must be of type int"),
        ({"kind": "acquire", "step": "1"}, "acquire.step is '1'; it must be of type int"),
        ({"kind": "acquire", "step": True}, "acquire.step is True; it must be of type int"),
        ({"kind": "dance"}, "the checkpoint daemon accepts 'acquire' and 'seal', not 'dance'"),
        ({}, "the checkpoint daemon accepts 'acquire' and 'seal', not None"),
        ({"kind": ["seal"]}, "accepts 'acquire' and 'seal', not ['seal']"),
    ],
)
def test_a_wrong_message_is_refused_with_its_field(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(framing.FramingError) as refused:
        DAEMON.read(message)
    assert problem in str(refused.value)
