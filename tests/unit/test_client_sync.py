"""The synchronous client: the methods of the asynchronous one, run by a thread that always ends."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import pytest
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver
from tests.harness.waiting import CALL_TIMEOUT_S

import megascale_client
from megascale.v1 import job_pb2, types_pb2
from megascale_client import AsyncClient, Client, InvalidRequest, NotFound
from megascale_common.service.status import of_code

Result = TypeVar("Result")

EXPORTED = {
    *("AsyncClient", "Client", "TERMINAL_PHASES", "FetchedCheckpoint", "FieldProblem"),
    *("find_run_folder", "load_job", "parse_job", "dump_job", "job_values"),
    *(
        "CheckResult",
        "CheckVerdict",
        "Device",
        "DeviceKind",
        "Job",
        "JobPhase",
        "Node",
        "JobCondition",
        "JobConditionType",
    ),
    *("NodeAssignment", "NodeDisposition", "NodeLiveness", "Profile", "RestoreSource"),
    *("Trace", "TraceState", "TimedOut", "SuspendJobResponse", "ResumeJobResponse"),
    *(
        "MegascaleError",
        "InvalidJob",
        "InvalidRequest",
        "NotFound",
        "AlreadyExists",
        "NotPossible",
        "NotAllowed",
    ),
    *("RestartJobResponse", "UpdateJobResponse", "DrainNodeResponse", "SetPolicyResponse"),
    "PolicyMode",
    *("DamagedCheckpoint", "LimitReached", "Unavailable", "ClusterNotFound", "ServiceFailure"),
}
METHODS = {
    *("from_run_folder", "close", "cluster_info"),
    *(
        "submit",
        "get",
        "jobs",
        "watch",
        "wait",
        "cancel",
        "explain",
        "heat_map",
        "topology",
        "mfu_decline",
        "timeline",
        "logs",
        "checkpoints",
        "fetch_checkpoint",
    ),
    *("profile", "profiled", "cancel_profile", "suspend", "resume", "delete"),
    *("restart", "update", "drain", "set_policy", "set_quota", "reset_breaker"),
    *("nodes", "evict", "cordon", "uncordon", "diagnose", "events", "watch_events"),
    "report_unreachable",
}


OWN_DOCSTRINGS = {"__init__", "close"}


@pytest.fixture
async def driver() -> AsyncIterator[ScriptedDriver]:
    scripted = await start_driver()
    yield scripted
    await scripted.server.stop(0)


async def in_thread(driver: ScriptedDriver, action: Callable[[Client], Result]) -> Result:
    """What ``action`` returns, called in a thread of its own with a client of the driver."""

    def run() -> Result:
        with Client(driver.address, TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
            return action(client)

    return await asyncio.to_thread(run)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - a state without an event
            await asyncio.sleep(0.01)


def waits(client: Client) -> bool:
    """Whether a thread waits for the next item of an iterator of this client."""
    tasks = asyncio.all_tasks(client._loop._loop)
    return any(getattr(task.get_coro(), "__name__", "") == "_next" for task in tasks)


def public(cls: type) -> set[str]:
    kinds = (cls, *cls.__bases__)
    return {name for kind in kinds for name in vars(kind) if not name.startswith("_")}


def test_the_exported_names_are_frozen() -> None:
    assert set(megascale_client.__all__) == EXPORTED
    assert all(hasattr(megascale_client, name) for name in EXPORTED)
    assert public(AsyncClient) == public(Client) == METHODS


@pytest.mark.parametrize("name", ["__init__", *sorted(METHODS - {"from_run_folder"})])
def test_a_method_takes_and_returns_the_same_in_both_clients(name: str) -> None:
    ours, theirs = getattr(Client, name), getattr(AsyncClient, name)
    assert list(inspect.signature(ours).parameters.values()) == list(
        inspect.signature(theirs).parameters.values()
    )
    assert inspect.getdoc(ours) == inspect.getdoc(theirs) or name in OWN_DOCSTRINGS
    returned, expected = (
        typing.get_type_hints(ours)["return"],
        typing.get_type_hints(theirs)["return"],
    )
    if typing.get_origin(expected) is AsyncIterator:
        assert typing.get_origin(returned) is Iterator
        assert typing.get_args(returned) == typing.get_args(expected)
    else:
        assert returned == expected


async def test_calls_and_iterators_return_the_drivers_answers(driver: ScriptedDriver) -> None:
    driver.updates = [1, 2, 3]
    driver.verdicts = {"matrix_product": types_pb2.CHECK_VERDICT_FAIL}

    def use(client: Client) -> None:
        assert client.submit(job_pb2.JobSpec(name="a")).spec.name == "a"
        assert client.get("a").spec.name == "a"
        assert [node.name for node in client.nodes()] == ["n0", "n1", "n2"]
        assert [update.step.step for update in client.watch("a")] == [1, 2, 3]
        assert list(client.logs("a", rank=0, lines=2)) == ["line 0", "line 1"]
        assert client.cordon("n1", reason="fan").node.disposition_reason == "fan"
        assert (
            client.uncordon("n1", reason="fixed").node.disposition
            == types_pb2.NODE_DISPOSITION_SCHEDULABLE
        )
        verdicts = {
            check.name: check.verdict for check in client.diagnose("n1", checks=["matrix_product"])
        }
        assert verdicts == {"matrix_product": types_pb2.CHECK_VERDICT_FAIL}
        assert [event.seq for event in client.events()] == [1, 2, 3]

    await in_thread(driver, use)


async def test_an_error_of_the_tree_is_raised(driver: ScriptedDriver) -> None:
    def use(client: Client) -> None:
        with pytest.raises(NotFound, match="no job x"):
            client.get("x")
        with pytest.raises(InvalidRequest):
            next(client.watch_events("nonsense"))

    driver.errors = [
        of_code("NOT_FOUND", "JOB_NOT_FOUND", "no job x"),
        of_code("INVALID_ARGUMENT", "", "subject"),
    ]
    await in_thread(driver, use)


async def test_events_continue_after_the_last_one(driver: ScriptedDriver) -> None:
    driver.updates, driver.break_after = [5, 6, 7, 8], 2

    def use(client: Client) -> list[int]:
        found = client.watch_events("nodes/n1")
        return [next(found).event.seq for _ in range(4)]

    assert await in_thread(driver, use) == [5, 6, 7, 8]
    tokens = [
        request.resume_token for request in driver.requests if hasattr(request, "resume_token")
    ]
    assert tokens == ["", "2"]


async def test_an_iterator_left_early_ends_its_stream(driver: ScriptedDriver) -> None:
    def use(client: Client) -> None:
        lines = client.logs("x", rank=0, lines=1, follow=True)
        assert next(lines) == "line 0"
        lines.close()  # type: ignore[attr-defined]
        for line in client.logs("x", rank=0, lines=1, follow=True):
            assert line == "line 0"
            break
        assert client.get("x").spec.name == "x"

    await in_thread(driver, use)
    await until(lambda: driver.open_streams == 0)


async def test_closing_ends_a_call_of_another_thread_and_leaves_no_thread(
    driver: ScriptedDriver,
) -> None:
    client = Client(driver.address, TOKEN)
    lines = client.logs("x", rank=0, lines=1, follow=True)
    assert await asyncio.to_thread(next, lines) == "line 0"
    waiting = asyncio.create_task(asyncio.to_thread(next, lines, None))
    await until(lambda: waits(client))  # for a line that never comes
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="closed while"):
        await waiting
    await asyncio.to_thread(client.close)
    with pytest.raises(RuntimeError, match="closed"):
        client.get("x")
    await until(
        lambda: not any(thread.name == "megascale-client" for thread in threading.enumerate())
    )


async def test_it_works_where_the_callers_thread_runs_a_loop(driver: ScriptedDriver) -> None:
    """As in a notebook. The driver runs in another thread, because this loop is blocked."""
    second = threading.Thread(target=lambda: asyncio.run(serve_until(started, done)))
    started: list[str] = []
    done = threading.Event()
    second.start()
    try:
        await until(lambda: bool(started))
        with Client(started[0], TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
            assert client.get("x").spec.name == "x"
    finally:
        done.set()
        second.join()


async def serve_until(started: list[str], done: threading.Event) -> None:
    driver = await start_driver()
    started.append(driver.address)
    while not done.is_set():  # noqa: ASYNC110 - an event of threads
        await asyncio.sleep(0.01)
    await driver.server.stop(0)


PROGRAM = """
import signal, sys
from megascale_client import Client
signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts and some CI ignore it
client = Client(sys.argv[1], sys.argv[2])
lines = client.logs("x", rank=0, lines=1, follow=True)
try:
    for line in lines:
        print(line, flush=True)
except KeyboardInterrupt:
    print("interrupted", client.get("x").spec.name, flush=True)
"""


async def test_ctrl_c_ends_the_stream_and_leaves_the_client_usable(driver: ScriptedDriver) -> None:
    command = [sys.executable, "-c", PROGRAM, driver.address, TOKEN]
    process = await asyncio.to_thread(
        subprocess.Popen, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def finish() -> tuple[Any, Any]:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line 0\n"
        time.sleep(0.2)  # so that it waits for the next line
        os.kill(process.pid, signal.SIGINT)
        return process.communicate(timeout=CALL_TIMEOUT_S)

    # The client is never closed, and one iterator is open at exit: the interpreter must not hang.
    output, errors = await asyncio.to_thread(finish)
    assert (output, errors, process.returncode) == (b"interrupted x\n", b"", 0)
    await until(lambda: driver.open_streams == 0)
