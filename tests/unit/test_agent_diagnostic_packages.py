"""Diagnostics of packages: found by entry points, run as our own, unable to stop the agent."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
from tests.harness.installed_package import install
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from megascale_common.service.channel import open_channel
from megascale_common.service.server import RpcServer
from megascale_executor.agent.checks.diagnosis import Diagnosis, SelfChecks
from megascale_executor.agent.link.heartbeat import build_hello
from megascale_executor.agent.link.service import SERVICE_NAME, ExecutorService
from megascale_executor.diagnostics.devices import cpu_slots
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.registry import Registry, load_registry, run_diagnostics
from megascale_job import loading

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "add-a-diagnostic.md"
TOKEN = "token-of-the-tests"
DEVICES = cpu_slots([0, 1], "test", 1 << 30, "host")
SKIPPED = types_pb2.CHECK_VERDICT_SKIPPED
VIEW: Any = SimpleNamespace()  # for checks that look at nothing
PASSES = """
from megascale_executor.diagnostics.diagnostic import Diagnostic
from megascale_executor.diagnostics.finding import Finding

class Check(Diagnostic):
    name = "{name}"

    async def run(self, node):
        return [Finding(self.name, "node", "PASS", "of {package}")]
"""

Diagnose = Callable[..., Awaitable[list[types_pb2.CheckResult]]]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path, like site-packages; its modules are forgotten afterwards."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    for name in ("acme_checks", "first_checks", "second_checks", "odd_checks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest_asyncio.fixture
async def diagnose(tmp_path: Path) -> AsyncIterator[Diagnose]:
    """RunNodeDiagnostics, as the driver calls it, of a node with two CPU slots."""
    daemon: Any = SimpleNamespace(serving_endpoint=None, holds_slots=None)
    servers: list[RpcServer] = []

    async def call(*names: str) -> list[types_pb2.CheckResult]:
        diagnosis = Diagnosis(load_registry(), DEVICES, tmp_path, cast(Any, None), daemon)
        service = ExecutorService(
            tmp_path,
            cast(Any, None),
            lambda key: False,
            lambda: None,
            diagnosis.run,
            cast(Any, None),
        )
        servers.append(server := RpcServer(TOKEN))
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server.server)
        address = await server.start("127.0.0.1:0", [SERVICE_NAME])
        async with open_channel(address, TOKEN) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            request = executor_pb2.RunNodeDiagnosticsRequest(checks=names)
            reply = await stub.RunNodeDiagnostics(request, timeout=CALL_TIMEOUT_S)
        return list(reply.checks)

    yield call
    for server in servers:
        await server.stop(0)


def verdicts(checks: Sequence[types_pb2.CheckResult]) -> list[tuple[str, str, str]]:
    return [
        (check.name, check.target, types_pb2.CheckVerdict.Name(check.verdict)) for check in checks
    ]


async def test_the_example_of_the_page_runs_on_demand_through_its_entry_point_alone(
    packages: Path, diagnose: Diagnose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (line,) = re.findall(r"^scratch_mounted = \"acme_checks:(\w+)\"$", PAGE.read_text(), re.M)
    install(packages, "acme-checks", code, {"scratch_mounted": line})
    monkeypatch.setenv("SCRATCH_FOLDER", "/")
    (found,) = await diagnose("scratch_mounted")
    assert verdicts([found]) == [("scratch_mounted", "/", "CHECK_VERDICT_PASS")]
    monkeypatch.delitem(sys.modules, "acme_checks")
    monkeypatch.setenv("SCRATCH_FOLDER", str(tmp_path))
    (found,) = await diagnose("scratch_mounted")
    assert verdicts([found]) == [("scratch_mounted", str(tmp_path), "CHECK_VERDICT_FAIL")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await diagnose("gpu_burn")
    assert "path_mtu, scratch_mounted" in str(caught.value.details())


@pytest.mark.parametrize(
    ("code", "entry", "reason"),
    [
        ("import no_such_module", "odd", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)", "odd", "cannot be loaded: SystemExit: 3"),
        ("class Other: ...", "odd", "AttributeError"),
        ("class Check:\n    name = 'odd'", "odd", "is not a Diagnostic: subclass it"),
        (PASSES.replace("async def", "def"), "odd", "is not a Diagnostic: subclass it"),
        (PASSES.replace("{name}", "even"), "odd", "does not have the entry point's name"),
        (PASSES.replace("{name}", "Odd"), "Odd", "has no valid name"),
        (PASSES + "    timeout_s = 0", "odd", "give a positive number of seconds"),
    ],
)
async def test_a_diagnostic_that_cannot_be_used_is_skipped_with_package_and_remedy(
    packages: Path, diagnose: Diagnose, code: str, entry: str, reason: str
) -> None:
    code = code.replace("{name}", entry).replace("{package}", "odd-checks")
    install(packages, "odd-checks", code, {entry: "Check"})
    room, odd = await diagnose("disk_room", entry)
    assert room.verdict in (types_pb2.CHECK_VERDICT_PASS, types_pb2.CHECK_VERDICT_DEGRADED)
    assert verdicts([odd]) == [(entry, "package:odd-checks", "CHECK_VERDICT_SKIPPED")]
    assert odd.detail.startswith("package odd-checks: odd_checks:Check ") and reason in odd.detail
    assert odd.detail.endswith("then restart the agent")


async def test_of_two_with_one_name_the_first_is_used_and_the_other_named(
    packages: Path, diagnose: Diagnose
) -> None:
    for package in ("second-checks", "first-checks"):
        code = PASSES.format(name="twice", package=package)
        install(packages, package, code, {"twice": "Check", "disk_room": "Check"})
    found = await diagnose("twice", "disk_room")
    assert [name for name, _, verdict in verdicts(found) if "SKIPPED" not in verdict] == [
        "disk_room",
        "twice",
    ]
    assert next(check.detail for check in found if check.name == "twice") == "of first-checks"
    skipped = {
        (check.name, check.target): check.detail for check in found if check.verdict == SKIPPED
    }
    assert set(skipped) == {
        ("disk_room", "package:first-checks"),
        ("disk_room", "package:second-checks"),
        ("twice", "package:second-checks"),
    }
    assert "taken by package megascale" in skipped["disk_room", "package:first-checks"]
    assert "taken by package first-checks" in skipped["twice", "package:second-checks"]
    assert all("rename the diagnostic" in detail for detail in skipped.values())


class Given(Diagnostic):
    """Does what the test gives it."""

    def __init__(self, name: str, action: Callable[[], Awaitable[Any]]) -> None:
        self.name, self._action = name, action

    async def run(self, node: NodeView) -> Sequence[Finding]:
        return cast(Sequence[Finding], await self._action())


async def test_a_check_that_raises_hangs_or_returns_nonsense_fails_and_the_next_one_runs() -> None:
    async def raises() -> Any:
        raise OSError("/scratch: Input/output error")

    async def leaves() -> Any:
        raise SystemExit(1)

    async def returns(value: Any) -> Any:
        return value

    hangs = Given("hangs", asyncio.Event().wait)
    hangs.timeout_s = 0.01
    checks = [
        Given("raises", raises),
        Given("leaves", leaves),
        hangs,
        Given("other", lambda: returns([Finding("compute", "cpu:0", "PASS", "")])),
        Given("splendid", lambda: returns([Finding("splendid", "n", cast(Any, "OK"), "")])),
        Given("nothing", lambda: returns(None)),
        Given("good", lambda: returns([Finding("good", "node", "PASS", "")])),
    ]
    found = {each.name: each for each in await run_diagnostics(checks, VIEW)}
    assert {name for name, each in found.items() if each.verdict == "FAIL"} == {
        each.name for each in checks[:-1]
    }
    assert found["good"].verdict == "PASS"
    assert found["raises"].detail == "OSError: /scratch: Input/output error"
    assert found["hangs"].detail == "no result within 0.01 s"
    assert "known verdict" in found["splendid"].detail


async def test_before_an_attempt_a_check_sees_the_job_and_its_devices(tmp_path: Path) -> None:
    seen: list[NodeView] = []

    class Looks(Diagnostic):
        name = "looks"
        on_demand = False

        async def run(self, node: NodeView) -> Sequence[Finding]:
            seen.append(node)
            return [Finding(self.name, "node", "DEGRADED", "")]

    class Burns(Looks):
        name = "burns"
        before_attempts, on_demand = False, True

    registry = Registry([Looks(), Burns()])
    assert registry.names == ("burns",)
    assert [each.name for each in registry.on_demand([])] == ["burns"]
    daemon: Any = SimpleNamespace(serving_endpoint=None, holds_slots=None)
    checks = SelfChecks(registry, DEVICES, tmp_path, daemon)
    config = loading.from_accepted(
        {
            "name": "j",
            "model": {
                "layers": 1,
                "hidden_size": 8,
                "heads": 1,
                "vocab_size": 16,
                "sequence_length": 4,
            },
            "training": {"steps": 1, "global_batch_size": 4},
        }
    )
    found = await checks.run(config, [2], [1], cast(Any, None))
    assert [(each.name, each.verdict) for each in found] == [("looks", "DEGRADED")]
    (view,) = seen
    assert view.attempt is not None and view.attempt.ranks == (2,)
    assert view.attempt.job is config and [device.index for device in view.devices] == [1]


def checked(name: str, verdict: str = "PASS", attempts: bool = False) -> Diagnostic:
    class Check(Diagnostic):
        before_attempts = attempts

        async def run(self, node: NodeView) -> Sequence[Finding]:
            return [Finding(self.name, ",".join(node.peers), cast(Any, verdict), "", value=7.0)]

    Check.name = name
    return Check()


async def test_what_broke_the_last_attempt_adds_checks_to_the_usual_ones(tmp_path: Path) -> None:
    daemon: Any = SimpleNamespace(serving_endpoint=None, holds_slots=None)
    config = cast(Any, None)

    async def run(usual: str, *wanted: str) -> list[tuple[str, str]]:
        registry = Registry(
            [checked("usual", usual, attempts=True), checked("links"), checked("x")]
        )
        checks = SelfChecks(registry, DEVICES, tmp_path, daemon, lambda: ("h1", "h2"))
        found = await checks.run(config, [0], [0], cast(Any, None), checks=wanted)
        assert all(each.target == "h1,h2" for each in found if each.verdict == "PASS")
        return [(each.name, each.verdict) for each in found]

    assert await run("PASS") == [("usual", "PASS")]
    assert await run("PASS", "links", "usual", "of_a_later_build") == [
        ("usual", "PASS"), ("links", "PASS"), ("of_a_later_build", "SKIPPED"),
    ]  # fmt: skip
    assert await run("FAIL", "links") == [("usual", "FAIL")], "that is reason enough"


async def test_what_a_node_has_measured_stands_in_its_hello(tmp_path: Path) -> None:
    daemon: Any = SimpleNamespace(serving_endpoint=None, holds_slots=None)
    registry = Registry([checked("slow", "FAIL"), checked("links")])
    diagnosis = Diagnosis(registry, DEVICES, tmp_path, cast(Any, None), daemon)
    assert diagnosis.measured == []
    await diagnosis.run(["links", "slow"])
    (figure,) = diagnosis.measured
    assert (figure.check, figure.value) == ("links", 7.0)
    config: Any = SimpleNamespace(node="n1", topology={}, node_folder=tmp_path)
    hello = build_hello(config, "n1-1", DEVICES, "h:1", "h:2", diagnosis.measured)
    assert list(hello.measured) == [figure]
