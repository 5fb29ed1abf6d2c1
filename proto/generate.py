"""Generate the Python code of every proto next to its source; --check only compares.

It needs the pinned grpcio-tools and mypy-protobuf of `make proto`: older generators, whose code
runs with a wider range of grpcio and protobuf versions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# (import root, folder of the .proto files relative to it)
SOURCES = [("proto", "megascale/v1"), ("services/common", "megascale_common/etcd")]
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(target: Path, root: str, folder: str) -> None:
    """Write the generated modules of ``root/folder`` under ``target``."""
    protos = sorted(
        p.relative_to(REPOSITORY / root) for p in (REPOSITORY / root / folder).glob("*.proto")
    )
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{REPOSITORY / root}"]
    command += [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The mypy plug-ins are in the folder of this interpreter, which may not be on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    subprocess.run([*command, *map(str, protos)], check=True, env={**os.environ, "PATH": path})


def generated(folder: Path) -> dict[str, str]:
    """Text of the generated modules in ``folder`` by file name."""
    return {p.name: p.read_text() for p in folder.iterdir() if p.name.endswith(SUFFIXES)}


def main() -> int:
    """Generate, or check; exit status 1 when something is stale."""
    check = "--check" in sys.argv[1:]
    stale = False
    for root, folder in SOURCES:
        if not check:
            generate(REPOSITORY / root, root, folder)
            continue
        with tempfile.TemporaryDirectory() as temporary:
            generate(Path(temporary), root, folder)
            if generated(Path(temporary) / folder) != generated(REPOSITORY / root / folder):
                print(
                    f"{root}/{folder}: generated code is stale; run `make proto`", file=sys.stderr
                )
                stale = True
    return int(stale)


if __name__ == "__main__":
    raise SystemExit(main())
