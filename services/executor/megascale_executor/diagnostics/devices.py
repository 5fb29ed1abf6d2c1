"""The devices of the host: CPU slots, or GPUs as nvidia-smi lists them.

CUDA is not used for that, because a stuck GPU would block the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megascale_common.service.errors import DeviceQueryError

# nvidia-smi takes 0.1 to 2 s without persistence mode; a GPU that fell off the bus can block it for
# minutes.
QUERY_TIMEOUT_S = 20.0
_FIELDS = "index,uuid,name,memory.total"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device; ``index`` is its place on the host in the order of the PCI bus."""

    index: int
    kind: Literal["cpu", "cuda"]
    uuid: str
    model: str
    memory_bytes: int


async def list_gpus() -> list[DeviceFacts]:
    """All GPUs that the NVIDIA driver lists.

    Raises:
        DeviceQueryError: no nvidia-smi, it fails, or it does not answer within QUERY_TIMEOUT_S.
    """
    command = ("nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        raise DeviceQueryError(
            f"nvidia-smi cannot be run: {error}; --device cuda needs the NVIDIA driver"
        ) from error
    try:
        output, _ = await asyncio.wait_for(process.communicate(), QUERY_TIMEOUT_S)
    except TimeoutError as error:
        raise DeviceQueryError(
            f"nvidia-smi did not answer within {QUERY_TIMEOUT_S:.0f} s"
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode != 0:
        raise DeviceQueryError(
            f"nvidia-smi failed with status {process.returncode}: {output.decode().strip()[:500]}"
        )
    return parse_gpus(output.decode())


def parse_gpus(output: str) -> list[DeviceFacts]:
    """Devices from nvidia-smi's CSV.

    Raises:
        DeviceQueryError: a line that is not one device.
    """
    devices = []
    for line in output.strip().splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].isdecimal() or not fields[3].isdecimal():
            raise DeviceQueryError(f"nvidia-smi wrote {line!r}, expected {_FIELDS}")
        devices.append(
            DeviceFacts(int(fields[0]), "cuda", fields[1], fields[2], int(fields[3]) * _MIB)
        )
    return devices


def cpu_slots(
    indices: Sequence[int], model: str, memory_bytes: int, host_id: str
) -> list[DeviceFacts]:
    """CPU slots. Each runs one rank; all share the host's processors and memory."""
    return [
        DeviceFacts(index, "cpu", f"cpu-{host_id[:8]}-{index}", model, memory_bytes)
        for index in indices
    ]
