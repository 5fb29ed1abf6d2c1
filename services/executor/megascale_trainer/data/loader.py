"""The data loader process: one per node, it prepares step batches for the node's workers.

    python -m megascale_trainer.data.loader --socket PATH --config JOB.json

It works ahead of need, listens on a unix socket that only its user may open, runs without torch,
and ends with the process that started it. Its messages to workers are described at
:mod:`megascale_trainer.data.loader_server`.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megascale_common.node.output import steady_streams
from megascale_common.node.process import arm_parent_death
from megascale_common.node.redaction import redact_streams
from megascale_common.node.unix_socket import listen
from megascale_job.config import JobConfig
from megascale_job.corpus_record import data_file_problems
from megascale_job.loading import from_json
from megascale_trainer.data.errors import CorpusError, DataError
from megascale_trainer.data.loader_server import MAX_CONNECTIONS, LoaderServer, Stream
from megascale_trainer.data.packing import SampleStream
from megascale_trainer.data.ring import Geometry

DESCRIPTORS_PER_SOURCE = 2  # a mapped file keeps one of its own
OWN_DESCRIPTORS = 64


def main(arguments: list[str] | None = None) -> None:
    """Run the loader of one node until it is stopped; exits with status 2 when it cannot start."""
    arm_parent_death()
    steady_streams()
    redact_streams()
    parser = argparse.ArgumentParser(
        prog="megascale-loader", description="Prepare step batches for the workers of a node."
    )
    parser.add_argument("--socket", type=Path, required=True, help="unix socket to listen on")
    parser.add_argument("--config", type=Path, required=True, help="the job, as JSON")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        config = from_json(options.config.read_text())
        geometry = Geometry.of(config)
        listener = listen(options.socket, "loader", MAX_CONNECTIONS)
    except (OSError, ValueError, DataError) as error:
        print(
            f"data loader cannot start ({options.config}, {options.socket}): {error}",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        server = LoaderServer(listener, geometry, _open_streams(config))
        while True:
            server.run_once()
    finally:
        options.socket.unlink(missing_ok=True)


def _open_streams(config: JobConfig) -> dict[str, Stream]:
    """All of the job's data, opened and checked before the first step.

    What is wrong with the data for evaluation is wrong with the job: training does not begin.
    """
    make_room(config)
    training = _open(config, "data")
    streams = {"training": Stream(training)}
    if config.evaluates:
        # Every evaluation reads the same, whatever training leaves out.
        data = replace(config.data, sources=config.evaluation.sources, skips=())
        held_out = replace(config, data=data)
        repeat_after = config.evaluation.batches * config.training.global_batch_size
        streams["evaluation"] = Stream(_open(held_out, "evaluation"), repeat_after)
    for problem in data_file_problems(config):
        refused = Stream(CorpusError(str(problem)))
        return {name: refused for name in streams}
    return streams


def make_room(config: JobConfig) -> None:
    """Ask for the descriptors of all sources; a system that does not give them fails later."""
    sources = len(config.data.sources) + len(config.evaluation.sources)
    needed = DESCRIPTORS_PER_SOURCE * sources + MAX_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _open(config: JobConfig, section: str) -> SampleStream | DataError:
    try:
        return SampleStream.open(config, section)
    except DataError as error:
        return error  # reported to the workers, which wait for the data


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
