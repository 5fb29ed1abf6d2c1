"""The client against a scripted driver on a socket: errors, retries, leader hints, watches."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tests.harness.scripted_driver import TOKEN, ScriptedDriver, start_driver
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale.v1 import driver_pb2_grpc, job_pb2, types_pb2
from megascale_client import (
    AlreadyExists,
    AsyncClient,
    ClusterNotFound,
    InvalidJob,
    InvalidRequest,
    MegascaleError,
    NotAllowed,
    NotFound,
    NotPossible,
    ServiceFailure,
    Unavailable,
)
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.server import RpcServer
from megascale_common.service.status import of_code


@pytest.fixture
async def driver() -> AsyncIterator[ScriptedDriver]:
    scripted = await start_driver()
    yield scripted
    await scripted.server.stop(0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExists),
        (grpc.StatusCode.FAILED_PRECONDITION, NotPossible),
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.INTERNAL, ServiceFailure),
    ],
)
async def test_a_status_becomes_its_error_with_reason_and_message(
    driver: ScriptedDriver, code: grpc.StatusCode, kind: type[MegascaleError]
) -> None:
    driver.errors = [of_code(code.name, "SOME_REASON", "a sentence")]
    async with AsyncClient(driver.address, TOKEN) as client:
        with pytest.raises(kind, match="a sentence") as caught:
            await client.get("x")
    assert type(caught.value) is kind
    assert caught.value.reason == "SOME_REASON"
    assert len(driver.requests) == 1  # no retry


async def test_refused_fields_become_problems(driver: ScriptedDriver) -> None:
    fields = [("trainer.model.heads", "not a multiple of tp"), ("name", "empty")]
    driver.errors = [of_code("INVALID_ARGUMENT", "INVALID_JOB", "bad job", fields=fields)]
    async with AsyncClient(driver.address, TOKEN) as client:
        with pytest.raises(InvalidJob) as caught:
            await client.submit(job_pb2.JobSpec())
    assert [(p.field, p.problem) for p in caught.value.problems] == fields


async def test_a_refused_field_of_another_call_is_not_a_refused_job(driver: ScriptedDriver) -> None:
    fields = [("rank", "9 is not one of the job's 8 ranks")]
    driver.errors = [of_code("INVALID_ARGUMENT", "INVALID", "bad", fields=fields)]
    async with AsyncClient(driver.address, TOKEN) as client:
        with pytest.raises(InvalidRequest, match="rank: 9 is not one") as caught:
            await anext(client.logs("x", rank=9))
    assert (type(caught.value), [p.field for p in caught.value.problems]) == (
        InvalidRequest,
        ["rank"],
    )


async def test_a_wrong_token_is_not_allowed(driver: ScriptedDriver) -> None:
    async with AsyncClient(driver.address, "wrong") as client:
        with pytest.raises(NotAllowed, match="token"):
            await client.get("x")


async def test_a_mutation_is_repeated_with_the_same_request_id(driver: ScriptedDriver) -> None:
    driver.errors = [of_code("UNAVAILABLE", "", "not yet")] * 2
    async with AsyncClient(driver.address, TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
        await client.submit(job_pb2.JobSpec(name="one"))
        await client.submit(job_pb2.JobSpec(name="two"))
    first, second, third, fourth = (request.request_id for request in driver.requests)
    assert first == second == third != ""
    assert fourth not in ("", first)


async def test_a_call_goes_to_the_leader_that_a_standby_reports(driver: ScriptedDriver) -> None:
    leader = await start_driver()
    hint = {"leader": leader.address}
    driver.errors = [of_code("UNAVAILABLE", "NOT_LEADER", "standby", metadata=hint)]
    async with AsyncClient(driver.address, TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
        assert (await client.get("x")).spec.name == "x"
        assert (len(driver.requests), len(leader.requests)) == (1, 1)
    await leader.server.stop(0)


async def test_standbys_that_report_each_other_as_leader_end_in_unavailable(
    driver: ScriptedDriver,
) -> None:
    hint = {"leader": driver.address}
    driver.errors = [of_code("UNAVAILABLE", "NOT_LEADER", "standby", metadata=hint)] * 1000
    async with AsyncClient(driver.address, TOKEN, retry_for_s=0.3) as client:
        with pytest.raises(Unavailable, match="standby"):
            await client.get("x")
    assert len(driver.requests) < 40


async def test_no_driver_is_unavailable_after_the_time_allowed() -> None:
    async with AsyncClient("127.0.0.1:1", TOKEN, retry_for_s=0.3) as client:
        with pytest.raises(Unavailable, match=r"no driver answered within 0\.3 s"):
            await client.get("x")


def self_signed(folder: Path) -> Certificates:
    """Key and certificate of a driver on 127.0.0.1."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = [
        *("openssl", "req", "-x509", "-nodes", "-days", "1"),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
        *("-subj", "/CN=driver", "-addext", "subjectAltName=IP:127.0.0.1"),
    ]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    return Certificates(key, certificate)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for its certificate")
async def test_a_driver_with_tls_is_reached_by_its_certificate_only(tmp_path: Path) -> None:
    tls = self_signed(tmp_path)
    server = RpcServer(TOKEN, tls=tls)
    driver_pb2_grpc.add_DriverServiceServicer_to_server(ScriptedDriver(), server.server)  # type: ignore[abstract]
    address = await server.start("127.0.0.1:0", ["megascale.v1.DriverService"])
    async with AsyncClient(
        address, TOKEN, root_certificate=tls.certificate, retry_for_s=CALL_TIMEOUT_S
    ) as client:
        assert (await client.get("x")).spec.name == "x"
    async with AsyncClient(address, TOKEN, retry_for_s=0.2) as client:
        with pytest.raises(Unavailable):
            await client.get("x")
    await server.stop(0)


async def test_lists_are_fetched_page_by_page(driver: ScriptedDriver) -> None:
    async with AsyncClient(driver.address, TOKEN) as client:
        assert [node.name async for node in client.nodes()] == ["n0", "n1", "n2"]


async def test_a_watch_resumes_after_the_last_update_at_the_new_address(
    driver: ScriptedDriver, tmp_path: Path
) -> None:
    successor = await start_driver()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "driver.address").write_text(driver.address)
    driver.updates = successor.updates = [1, 2, 3, 4]
    driver.break_after = 2
    seen = []
    async with AsyncClient.from_run_folder(tmp_path, retry_for_s=CALL_TIMEOUT_S) as client:
        async for update in client.watch("job"):
            seen.append(update.step.step)
            if len(seen) == 2:
                (tmp_path / "driver.address").write_text(successor.address)
    assert seen == [1, 2, 3, 4]
    assert [
        request.resume_token for request in successor.requests if hasattr(request, "resume_token")
    ] == ["2"]
    await successor.server.stop(0)


async def test_a_stream_that_ends_before_the_job_is_opened_again(driver: ScriptedDriver) -> None:
    driver.updates, driver.phase = [1, 2], types_pb2.JOB_PHASE_RUNNING
    seen = []
    async with AsyncClient(driver.address, TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
        async for update in client.watch("job"):
            seen.append(update.step.step)
            if len(seen) == 2:
                driver.updates = [1, 2, 3]
            if len(seen) == 3:
                driver.phase = types_pb2.JOB_PHASE_SUCCEEDED
    assert seen == [1, 2, 3]


async def test_updates_that_a_new_driver_repeats_are_yielded_once(driver: ScriptedDriver) -> None:
    driver.updates, driver.break_after = [1, 2, 3, 4], 3
    driver.forgets_tokens = True
    async with AsyncClient(driver.address, TOKEN, retry_for_s=CALL_TIMEOUT_S) as client:
        assert [update.step.step async for update in client.watch("job")] == [1, 2, 3, 4]


async def test_a_watch_of_no_job_is_not_found(driver: ScriptedDriver) -> None:
    driver.errors = [of_code("NOT_FOUND", "JOB_NOT_FOUND", "no job x")]
    async with AsyncClient(driver.address, TOKEN) as client:
        with pytest.raises(NotFound):
            async for _ in client.watch("x"):
                pass


def test_a_run_folder_without_a_cluster_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ClusterNotFound, match="megascale up"):
        AsyncClient.from_run_folder()
    with pytest.raises(ClusterNotFound, match="--run-folder"):
        AsyncClient.from_run_folder(tmp_path)
    monkeypatch.setenv("MEGASCALE_RUN_FOLDER", str(tmp_path / "elsewhere"))
    with pytest.raises(ClusterNotFound, match="elsewhere"):
        AsyncClient.from_run_folder()
