"""What the client returns, as its users see it: enums by name, calls as they are written."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import pickle
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import AsyncClient, InvalidRequest, NotPossible, messages
from megascale_client.views import View
from megascale_common.service.status import of_code


@pytest.fixture
async def driver() -> AsyncIterator[ScriptedDriver]:
    scripted = await start_driver()
    yield scripted
    await scripted.server.stop(0)


@pytest.fixture
async def client(driver: ScriptedDriver) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(driver.address, TOKEN, retry_for_s=5) as opened:
        yield opened


async def test_enums_print_their_names(driver: ScriptedDriver, client: AsyncClient) -> None:
    driver.phase = types_pb2.JOB_PHASE_RUNNING
    job = await client.get("a")
    assert (str(job.phase), f"{job.phase:>8}") == ("RUNNING", " RUNNING")
    from megascale_client import JobPhase

    assert job.phase is JobPhase.RUNNING and job.phase == types_pb2.JOB_PHASE_RUNNING
    cordoned = await client.cordon("n1", "a cable")
    assert f"{cordoned.node.disposition}" == "CORDONED"
    (check,) = await client.diagnose("n1", ["disk_room"])
    assert str(check.verdict) == "PASS"


def test_a_view_is_read_only_and_shows_what_the_message_holds() -> None:
    from megascale_client import Job, JobPhase, TraceState

    message = driver_pb2.Job(phase=types_pb2.JOB_PHASE_FAILED, nodes=["n1", "n2"])
    message.profile.traces.add(rank=3, state=types_pb2.TRACE_STATE_LOST)
    job = Job(message)
    assert (job.phase, list(job.nodes)) == (JobPhase.FAILED, ["n1", "n2"])
    assert [trace.state for trace in job.profile.traces] == [TraceState.LOST]
    assert (job.HasField("profile"), job.HasField("last_record")) == (True, False)
    with pytest.raises(AttributeError, match="read-only"):
        job.phase = JobPhase.RUNNING
    with pytest.raises(AttributeError, match="no_such_field"):
        job.no_such_field  # type: ignore[attr-defined]  # noqa: B018
    assert copy.deepcopy(job) == pickle.loads(pickle.dumps(job)) == job == message
    assert "phase" in dir(job)


def test_a_value_of_a_later_version_has_a_name_too() -> None:
    from megascale_client import Job

    job = Job(driver_pb2.Job.FromString(driver_pb2.Job(phase=4).SerializeToString()[:-1] + b"\x63"))
    assert (str(job.phase), job.phase) == ("VALUE_99", 99)


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("logs", ("demo", 3)),
        ("cancel", ("demo", "wrong data")),
        ("evict", ("n1", "a fan")),
        ("cordon", ("n1", "a cable")),
        ("uncordon", ("n1", "replaced")),
        ("diagnose", ("n1", ["disk_room"])),
        ("profile", ("demo", 2)),
        ("wait", ("demo", "RUNNING")),
        ("fetch_checkpoint", ("demo", "folder")),
    ],
)
def test_a_call_takes_what_a_user_writes(method: str, arguments: tuple[object, ...]) -> None:
    inspect.signature(getattr(AsyncClient, method)).bind(None, *arguments)


async def test_a_job_is_awaited(driver: ScriptedDriver, client: AsyncClient) -> None:
    from megascale_client import TimedOut

    starting, running = types_pb2.JOB_PHASE_STARTING, types_pb2.JOB_PHASE_RUNNING
    driver.phases = [starting, running, types_pb2.JOB_PHASE_SUCCEEDED]
    assert str((await client.wait("a")).phase) == "SUCCEEDED"
    assert str((await client.wait("a", "running")).phase) == "RUNNING"
    with pytest.raises(NotPossible, match="ended as SUCCEEDED and was not seen QUEUED"):
        await client.wait("a", "QUEUED")
    driver.phases = [starting]
    with pytest.raises(TimedOut, match=r"job a is not RUNNING after 0\.2 s"):
        await client.wait("a", "RUNNING", timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"job a has not ended after 0\.2 s"):
        await client.wait("a", timeout_s=0.2)


async def test_jobs_are_listed_by_phase(driver: ScriptedDriver, client: AsyncClient) -> None:
    from megascale_client import JobPhase

    for name, phase in (("a", 4), ("b", 6), ("c", 1)):
        driver.jobs.append(driver_pb2.Job(spec=job_pb2.JobSpec(name=name), phase=phase))

    async def names(**filters: object) -> list[str]:
        return [job.spec.name async for job in client.jobs(**filters)]  # type: ignore[arg-type]

    assert await names() == ["a", "b", "c"]
    assert await names(phase=JobPhase.RUNNING) == await names(phase="running") == ["a"]
    assert await names(phase=[JobPhase.QUEUED, "SUCCEEDED"]) == ["b", "c"]
    with pytest.raises(InvalidRequest, match="give one of QUEUED"):
        await names(phase="asleep")


async def test_the_snippet_of_the_clients_page_runs_as_pasted(
    driver: ScriptedDriver, tmp_path: Path
) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()
    (snippet,) = re.findall(r"```python\n(from megascale_client.*?)```", page, re.DOTALL)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "driver.address").write_text(driver.address)
    spec = job_pb2.JobSpec(name="example")
    driver.jobs.append(driver_pb2.Job(spec=spec, phase=types_pb2.JOB_PHASE_RUNNING, step=7))
    driver.phases = [types_pb2.JOB_PHASE_RUNNING, types_pb2.JOB_PHASE_SUCCEEDED]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", snippet),
        env={**os.environ, "MEGASCALE_RUN_FOLDER": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), CALL_TIMEOUT_S)
    lines = output.decode().splitlines()
    assert lines[:3] == ["example RUNNING 7", "SUCCEEDED: ", "line 0"] and len(lines) == 7


async def test_a_rank_whose_node_is_lost_is_no_missing_driver(
    driver: ScriptedDriver, client: AsyncClient
) -> None:
    driver.lost_ranks = {1}
    with pytest.raises(Exception, match=r"^node n2 is lost$"):
        await anext(client.logs("a", 1))


async def test_a_refused_field_has_its_remedy(driver: ScriptedDriver, client: AsyncClient) -> None:
    fields = [("trainer.model.heads", "3 is not a multiple of tp = 2; use 4; or tp 1")]
    driver.errors = [of_code("INVALID_ARGUMENT", "BAD_JOB_SPEC", "bad job", fields=fields)]
    with pytest.raises(InvalidRequest) as caught:
        await client.submit(job_pb2.JobSpec())
    (problem,) = caught.value.problems
    assert (problem.problem, problem.remedy) == ("3 is not a multiple of tp = 2", "use 4; or tp 1")


CLASSES = [name for name in messages.__all__ if inspect.isclass(getattr(messages, name))]
PYTHON_TYPES = {
    FieldDescriptor.CPPTYPE_STRING: "str",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_DOUBLE: "float",
    FieldDescriptor.CPPTYPE_FLOAT: "float",
    **dict.fromkeys(
        (
            FieldDescriptor.CPPTYPE_INT32,
            FieldDescriptor.CPPTYPE_INT64,
            FieldDescriptor.CPPTYPE_UINT32,
            FieldDescriptor.CPPTYPE_UINT64,
        ),
        "int",
    ),
}


def has_enum(message: Descriptor) -> bool:
    """True for a message that the client shows as a view; a job's spec is what a user writes."""
    inner = (field.message_type for field in message.fields if field.message_type is not None)
    return not message.file.name.endswith("job.proto") and (
        any(field.enum_type is not None for field in message.fields) or any(map(has_enum, inner))
    )


def shown_type(field: FieldDescriptor) -> str:
    """The annotation of a field of a view."""
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return "Mapping[{}, {}]".format(*map(shown_type, inner.fields))
    if field.enum_type is not None:
        plain = field.enum_type.name
    elif inner is not None:
        plain = inner.name if has_enum(inner) else proto_name(inner)
    else:
        plain = PYTHON_TYPES[field.cpp_type]
    return f"Sequence[{plain}]" if field.is_repeated else plain


def proto_name(message: Descriptor) -> str:
    """A message as the client's source names it, such as types_pb2.Node."""
    return f"{Path(message.file.name).stem}_pb2.{message.name}"


@pytest.mark.parametrize("name", CLASSES)
def test_a_view_or_an_enum_has_all_that_its_proto_has(name: str) -> None:
    kind = getattr(messages, name)
    assert kind.__doc__
    if issubclass(kind, View):
        message = kind._TYPE.DESCRIPTOR
        fields = {field.name: shown_type(field) for field in message.fields}
        assert kind.__annotations__ == {"proto": proto_name(message), **fields}
        return
    (enum,) = (
        file.DESCRIPTOR.enum_types_by_name[name]
        for file in (types_pb2, driver_pb2)
        if name in file.DESCRIPTOR.enum_types_by_name
    )
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    values = {value.name.removeprefix(prefix): value.number for value in enum.values}
    assert values == {each.name: int(each) for each in kind}
