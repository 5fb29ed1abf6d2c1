"""A node whose ranks train over peer memory until one of them stalls.

The stalled rank's process stays alive.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Literal

from tests.harness.agent_process import TOKEN, AgentProcess, start_agent
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.recording_driver import RecordingDriver, whole_on_one_node
from tests.harness.training import hiding, tiny_job
from tests.harness.waiting import Standstill

from megascale.v1 import link_pb2
from megascale_job.loading import from_accepted

# A first step on a device loads and compiles kernels, on one rank later than on the other.
TIMEOUT_S = {"cpu": 6.0, "cuda": 15.0}
_STALLED_RANK = 1


async def end_of_a_stall(
    folder: Path, device: Literal["cpu", "cuda"], axis: Literal["tp", "pp"]
) -> tuple[link_pb2.Heartbeat, str]:
    """Stop rank 1 of the two on ``axis`` after some steps (SIGSTOP).

    Returns:
        The heartbeat that reports the attempt's end, and rank 0's log.
    """
    write_corpus(folder / "corpus", random_documents(seed=1, count=50, longest=60))
    driver = RecordingDriver("test", TOKEN)
    await driver.start(folder / "driver.address")
    agent = start_agent(folder, template="", options=("--device", device))
    try:
        # On a device a wait for a message through peer memory has no bound of its own.
        edges = ("peer_edges",) if device == "cpu" else ()
        given = _assignment(folder, axis, TIMEOUT_S[device], edges)
        await driver.until_joined()
        driver.want(link_pb2.DESIRED_PHASE_PREPARE, given)
        prepared = await driver.until_phase(link_pb2.ATTEMPT_PHASE_PREPARED)
        given.store_endpoint = prepared.store_endpoint
        driver.want(link_pb2.DESIRED_PHASE_START, given)
        running = await driver.until_phase(link_pb2.ATTEMPT_PHASE_RUNNING)
        await driver.until(lambda: len(driver.steps) > 3)
        os.kill(running.workers[_STALLED_RANK].pid, signal.SIGSTOP)
        failed = await driver.until_phase(link_pb2.ATTEMPT_PHASE_FAILED)
        return failed, _log(agent, 0)
    except Standstill as standstill:
        standstill.add_note("\n".join(_log(agent, rank) for rank in (0, 1)))
        raise
    finally:
        agent.end()
        await driver.stop()


def _log(agent: AgentProcess, rank: int) -> str:
    path = agent.node_folder / f"jobs/tiny/attempt-000001/rank-{rank:05}.log"
    return path.read_text() if path.exists() else f"rank {rank} has no log"


def _assignment(
    folder: Path, axis: str, timeout_s: float, edges: tuple[str, ...]
) -> link_pb2.AttemptAssignment:
    config = from_accepted(
        tiny_job(
            parallelism={axis: 2, **hiding(axis, *edges)},
            training={"steps": 1_000_000},
            data={"sources": [{"prefix": str(folder / "corpus")}]},
            recovery={"collective_timeout_s": timeout_s},
        )
    )
    return whole_on_one_node(config)
