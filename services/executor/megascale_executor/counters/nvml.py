"""GPUs as NVML reports them, for counters and for the diagnostic `gpu_health`.

    python -m megascale_executor.counters.nvml

prints one JSON object, {"driver", "devices"}; exit status 2 means that NVML is not available. It
needs the extra `nvml` (nvidia-ml-py). A value that a GPU does not support is null. NVML can block
for minutes when a GPU has fallen off the bus, so callers use a thread or a process of their own.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megascale_executor.counters.reading import NotShown, Reading, Source

# Bits of the clocks' event reasons that slow a GPU for heat or power (nvml.h).
THROTTLE_BITS = {
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}


def load() -> Any:
    """The library, initialised.

    Raises:
        NotShown: no nvidia-ml-py, or no driver.
    """
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        raise NotShown("nvidia-ml-py is not installed: install the extra `nvml`") from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NotShown(f"NVML: {error}") from error
    return library


def read_devices(library: Any) -> dict[str, Any]:
    """Facts of all GPUs: {"driver": version, "devices": [{...}]}."""

    def ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except library.NVMLError:
            return None

    found = []
    for index in range(library.nvmlDeviceGetCount()):
        handle = ask(lambda index=index: library.nvmlDeviceGetHandleByIndex(index))  # type: ignore[misc]
        if handle is None:
            found.append({"index": index, "lost": True})
        else:
            found.append({"index": index, "lost": False, **_facts(library, handle, ask)})
    return {"driver": _text(ask(library.nvmlSystemGetDriverVersion)), "devices": found}


def _facts(library: Any, handle: Any, ask: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
    nv = library
    uncorrected, volatile = nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nv.NVML_VOLATILE_ECC
    corrected, aggregate = nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, nv.NVML_AGGREGATE_ECC
    rows = ask(lambda: nv.nvmlDeviceGetRemappedRows(handle)) or (None,) * 4
    fields = ask(
        lambda: nv.nvmlDeviceGetFieldValues(handle, [nv.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    )
    action = fields[0].value.uiVal if fields and fields[0].nvmlReturn == 0 else None
    return {
        "uuid": _text(ask(lambda: nv.nvmlDeviceGetUUID(handle))),
        "model": _text(ask(lambda: nv.nvmlDeviceGetName(handle))),
        "recovery_action": action,
        "ecc_uncorrected": ask(
            lambda: nv.nvmlDeviceGetTotalEccErrors(handle, uncorrected, volatile)
        ),
        "ecc_uncorrected_ever": ask(
            lambda: nv.nvmlDeviceGetTotalEccErrors(handle, uncorrected, aggregate)
        ),
        "ecc_corrected": ask(lambda: nv.nvmlDeviceGetTotalEccErrors(handle, corrected, volatile)),
        "rows_corrected": rows[0],
        "rows_uncorrected": rows[1],
        "rows_pending": rows[2],
        "rows_failed": rows[3],
        "throttle": ask(lambda: nv.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "sm_clock_mhz": ask(lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)),
        "memory_clock_mhz": ask(lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM)),
        "power_mw": ask(lambda: nv.nvmlDeviceGetPowerUsage(handle)),
        "temperature_c": ask(lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),
        "pcie_generation": ask(lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
        "pcie_width": ask(lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        "pcie_width_max": ask(lambda: nv.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    }


class Gpus(Source):
    """Clocks, power, throttling, ECC and Xid of every GPU."""

    name = "gpu"

    def __init__(self) -> None:
        self._library: Any = None
        self._events: Any = None
        self._xids: dict[tuple[str, int], int] = {}

    def read(self) -> Sequence[Reading]:
        """Counters by GPU; targets of Xid are ``UUID:XID``, counted since the agent's start."""
        if self._library is None:
            self._library = load()
            self._events = self._watch()
        self._collect_xids()
        devices = read_devices(self._library)["devices"]
        found = [reading for device in devices for reading in readings(device)]
        found += [
            Reading("xid_total", f"{uuid}:{xid}", count)
            for (uuid, xid), count in self._xids.items()
        ]
        return found

    def _watch(self) -> Any:
        nv = self._library
        try:
            events = nv.nvmlEventSetCreate()
            for index in range(nv.nvmlDeviceGetCount()):
                handle = nv.nvmlDeviceGetHandleByIndex(index)
                nv.nvmlDeviceRegisterEvents(handle, nv.nvmlEventTypeXidCriticalError, events)
        except nv.NVMLError:
            return None
        return events

    def _collect_xids(self) -> None:
        nv = self._library
        for _ in range(64 if self._events is not None else 0):
            try:
                event = nv.nvmlEventSetWait_v2(self._events, 0)
                uuid = _text(nv.nvmlDeviceGetUUID(event.device))
            except nv.NVMLError:  # none is waiting
                return
            key = (uuid, int(event.eventData))
            self._xids[key] = self._xids.get(key, 0) + 1


def readings(device: dict[str, Any]) -> list[Reading]:
    """Counters from the facts of one GPU; unsupported ones are left out."""
    target = str(device.get("uuid") or device["index"])
    found = [Reading("gpu_lost", target, float(device["lost"]))]
    for key, name, scale in (
        ("sm_clock_mhz", "gpu_sm_clock_hertz", 1e6),
        ("memory_clock_mhz", "gpu_memory_clock_hertz", 1e6),
        ("power_mw", "gpu_power_watts", 1e-3),
        ("temperature_c", "gpu_temperature_celsius", 1.0),
        ("ecc_uncorrected", "gpu_ecc_uncorrected_total", 1.0),
        ("ecc_corrected", "gpu_ecc_corrected_total", 1.0),
        ("rows_uncorrected", "gpu_remapped_rows_uncorrected_total", 1.0),
    ):
        if (value := device.get(key)) is not None:
            found.append(Reading(name, target, value * scale))
    if (bits := device.get("throttle")) is not None:
        found += [
            Reading("gpu_throttled", f"{target}:{reason}", float(bool(bits & bit)))
            for bit, reason in THROTTLE_BITS.items()
        ]
    return found


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def main() -> int:
    """Print the facts of all GPUs."""
    try:
        print(json.dumps(read_devices(load())))
    except NotShown as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
