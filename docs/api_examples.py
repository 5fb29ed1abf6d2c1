"""The examples of the API page: the requests that the scripts of clients/grpcurl send.

Each script runs with a program in place of grpcurl that records its arguments, so no cluster is
needed, and the page shows the same request that tests/integration/test_grpcurl.py sends to one.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from docs.pages import REPOSITORY

SCRIPTS = REPOSITORY / "clients" / "grpcurl"
FOLDERS = {
    "DriverService": "driver",
    "ExecutorLinkService": "link",
    "ExecutorService": "executor",
    "CheckpointService": "checkpoint",
}
# The value on the page for each argument that a script requires.
_SAMPLES = {
    "JOB": "demo",
    "NAME": "demo",
    "NODE": "n1",
    "RANK": "0",
    "DEVICE": "0",
    "STEP": "5",
    "REASON": "its fan is loud",
    "CORPUS_PREFIX": "/data/corpus",
    "CHECKPOINT_FOLDER": "/data/checkpoints",
    "SCRATCH_FOLDER": "/data/scratch",
    "SPEC": '{"name": "demo", "priority": 1}',
    "RULE": "hang",
    "TENANT": "research",
    "DEVICES": "64",
    "MODE": "OBSERVE",
    "CONDITION": "NotReady (NodeStatusUnknown)",
    "SUBJECT": "nodes/n1",
    "SECONDS": "7200",
}
_ADDRESS = "127.0.0.1:1"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RECORDER = """#!/bin/sh
printf '%s\\n' "$@" >"$RECORD"
"""


@dataclass(frozen=True, slots=True)
class Example:
    """One example: the script's command line, its purpose, and the JSON request that it sends."""

    command: str
    purpose: str
    method: str
    request: str


@dataclass(frozen=True, slots=True)
class Script:
    """A script of clients/grpcurl: its arguments as its usage line names them, and its purpose."""

    path: Path
    arguments: str
    purpose: str


def script(service: str, call: str) -> Script:
    """The script of one call."""
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", call).lower()
    path = SCRIPTS / FOLDERS[service] / f"{name}.sh"
    lines = path.read_text(encoding="utf-8").splitlines()
    usage = (re.match(r'usage \d+ "\$#" "([^"]*)"', line) for line in lines)
    arguments = next((found[1] for found in usage if found), "")
    comment = itertools.takewhile(lambda line: line.startswith("# "), lines[1:])
    return Script(path, arguments, " ".join(line[2:] for line in comment))


def example(service: str, call: str) -> Example:
    """The example of one call."""
    found = script(service, call)
    # Arguments in brackets are optional.
    samples = [_SAMPLES[word] for word in found.arguments.partition("[")[0].split()]
    method, request = _recorded(found.path, samples)
    command = shlex.join([str(found.path.relative_to(REPOSITORY)), *samples])
    return Example(command, found.purpose, method, request)


def _recorded(script: Path, arguments: list[str]) -> tuple[str, str]:
    """Method and request of the one call that ``script`` makes."""
    with tempfile.TemporaryDirectory() as folder:
        recorder, record = Path(folder) / "grpcurl", Path(folder) / "arguments"
        recorder.write_text(_RECORDER)
        recorder.chmod(0o700)
        settings = {
            "GRPCURL": str(recorder),
            "RECORD": str(record),
            "MEGASCALE_ADDRESS": _ADDRESS,
            "MEGASCALE_TOKEN": "none",
        }
        environment = {"PATH": os.environ["PATH"], **settings}
        # The exit status means nothing here: link/connect.sh expects to be refused.
        subprocess.run([script, *arguments], env=environment, capture_output=True, check=False)
        sent = record.read_text()
    data, _, rest = sent.partition("\n-d\n")[2].partition(f"\n{_ADDRESS}\n")
    return rest.strip(), _UUID.sub("a-new-uuid", data)
