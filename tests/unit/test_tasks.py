"""Tasks in the background: none ends by an error without a consequence."""

from __future__ import annotations

import ast
import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.harness.waiting import eventually

from megascale_common.service import tasks

REPOSITORY = Path(__file__).resolve().parents[2]

_PROCESS = """
import asyncio, os, signal, sys
from megascale_common.service import logs, tasks

async def fails():
    await asyncio.sleep(0)
    {how}

async def main():
    stop = asyncio.Event()
    {handler}
    task = tasks.essential(fails(), "part")
    await stop.wait()

logs.configure("test")
tasks.STOP_S = 0.2
asyncio.run(main())
raise SystemExit(tasks.exit_status())
"""
_ORDERLY = "asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)"
_DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize("how", ["raise OSError(28, 'full')", "raise asyncio.CancelledError"])
@pytest.mark.parametrize("handler", [_ORDERLY, _DEAF], ids=["stops in order", "does not stop"])
def test_a_process_ends_with_its_essential_part(how: str, handler: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROCESS.format(how=how, handler=handler)],
        capture_output=True,
        check=False,
    )
    assert ended.returncode == tasks.DEFECT
    assert b'"part": "part"' in ended.stderr


async def test_an_essential_part_may_be_cancelled_by_its_owner() -> None:
    before = signal.getsignal(signal.SIGTERM)
    task = tasks.essential(asyncio.sleep(3600), "part")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and tasks.exit_status() == 0
    assert signal.getsignal(signal.SIGTERM) == before


async def test_a_repeated_part_is_started_again_after_an_error() -> None:
    starts = 0

    async def part() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise RuntimeError(f"error {starts}")
        await asyncio.Event().wait()

    with capture_logs() as lines:
        task = tasks.repeated(part, "watch", again_s=0.01)
        await eventually(lambda: starts == 3, "the third start")
    assert not task.done()
    assert [line["part"] for line in lines] == ["watch", "watch"]
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_the_error_of_a_single_task_is_logged_when_it_happens() -> None:
    async def part() -> None:
        raise RuntimeError("once")

    with capture_logs() as lines:
        await asyncio.wait([tasks.single(part(), "effect")])
        await asyncio.sleep(0)
    [line] = lines
    assert (line["task"], str(line["exc_info"])) == ("effect", "once")


# Tasks that are kept by their owner, and whose errors somebody reads: by file, whoever does.
_READ_BY = {
    "services/common/megascale_common/etcd/lease.py": "the lease ends without renewals or looks",
    "services/common/megascale_common/etcd/client.py": "the iterator raises it",
    "services/checkpoint/megascale_checkpoint/memory/slots.py": "checksums() awaits it",
    "services/driver/megascale_driver/nodes/open_links.py": "it closes its link in any case",
    "services/driver/megascale_driver/nodes/probes.py": "it logs its errors itself",
    "services/executor/megascale_executor/agent/run/attempt_runner.py": "a guard fails the attempt",
    "services/executor/megascale_executor/agent/checks/diagnosis.py": "run() reads it",
    "services/executor/megascale_executor/agent/processes/template.py": "ends its template",
    "services/executor/megascale_executor/agent/workers/workers.py": "a guard fails the attempt",
    "clients/dashboard/megascale_dashboard/cluster_reader.py": "each page reads it",
}


def _kept_tasks(tree: ast.Module) -> Iterator[int]:
    """Lines that make a task with asyncio alone and keep it in an attribute, or nowhere."""
    for node in ast.walk(tree):
        kept: ast.expr | None = None
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            kept = node.value if any(map(_is_attribute, targets)) else None
        elif isinstance(node, ast.Expr) and not _adds_to_a_local(node.value):
            kept = node.value
        for part in ast.walk(kept) if kept is not None else ():
            if (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Attribute)
                and part.func.attr in ("create_task", "ensure_future")
                and isinstance(part.func.value, ast.Name)
                and part.func.value.id == "asyncio"
            ):
                yield part.lineno


def _is_attribute(target: ast.expr) -> bool:
    while isinstance(target, ast.Subscript):
        target = target.value
    return isinstance(target, ast.Attribute)


def _adds_to_a_local(call: ast.expr) -> bool:
    """Whether this is ``name.append(...)`` or another method of a local variable."""
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id != "asyncio"
    )


def test_tasks_that_nobody_awaits_are_started_by_the_helpers() -> None:
    found: dict[str, list[int]] = {}
    for room in ("services", "clients/dashboard"):
        for path in (REPOSITORY / room).rglob("*.py"):
            name = str(path.relative_to(REPOSITORY))
            if name.endswith("service/tasks.py"):
                continue
            if lines := list(_kept_tasks(ast.parse(path.read_text()))):
                found[name] = lines
    bare = {name: lines for name, lines in found.items() if name not in _READ_BY}
    assert not bare, f"start these by megascale_common.service.tasks: {bare}"
    assert not _READ_BY.keys() - found.keys(), "these no longer keep a task of their own"
