"""The numbered errors in kernel logs: Xid of NVIDIA GPUs and SXid of NVSwitches.

Numbers and meaning: NVIDIA's Xid catalogue of 2025-10-29
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html) and the Fabric Manager User Guide,
DU-09883-001, for SXid, both as transcribed in leptonai/gpud. Actions are this project's:
``RESET_GPU``, ``RESTART_BM`` and ``WORKFLOW_NVLINK_ERR`` of the catalogue evict the node,
``RESTART_APP`` restarts, ``IGNORE`` and ``CONTACT_SUPPORT`` without a reset alert.
"""

from __future__ import annotations

import re
from functools import cache

from megascale_common.node.logs.categories import Action, Kind, Role

# "NVRM: Xid (PCI:0000:cb:00): 13, ...", without "PCI:" in old drivers.
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")
_SXID = re.compile(r"SXid \([^)]*\): (\d+),")
# The form in which agents and plug-ins repeat them: "XidCriticalError: Xid=48 on Device=GPU-...".
_XID_TOLD = re.compile(
    r"(?<![sS])\bxid(?:_?errors?|criticalerror)?\b(?: (?:error|code|event|number))*[ :=#\"']*"
    r"\(?(\d{1,3})\b(?![.:]?\d)",
    re.IGNORECASE,
)
_DEVICE = re.compile(r"\b(?:nvidia|nvrm|gpus?|device|pci|dmesg|kmsg)\b|GPU-", re.IGNORECASE)
LITERALS = ("xid", "sxid", "xidcriticalerror", "xid_errors", "xiderror")  # in lower case
_FATAL = re.compile(r"(?<![-\w])fatal", re.IGNORECASE)
_NON_FATAL = re.compile(r"\bnon-?fatal", re.IGNORECASE)

_CATEGORIES: dict[str, tuple[tuple[int, ...], Action]] = {
    "gpu_sm_exception": ((13,), "restart"),
    "gpu_mmu_fault": ((31,), "restart"),
    "gpu_ctxsw_timeout": ((109,), "evict_restart"),
    "gpu_pmu_halt": ((62, 169), "evict_restart"),
    "gpu_fallen_off_bus": ((79, 167), "evict_restart"),
    "gsp_rpc_timeout": ((119, 120), "evict_restart"),
    "gpu_init_failed": ((143,), "evict_restart"),
    "gpu_ecc_uncorrectable": ((48, 95, 140, 171, 172), "evict_restart"),
    "gpu_row_remap": ((64, 156), "evict_restart"),
    "nvlink_error": ((74, 136, 155), "evict_restart"),
}
# One category with another action than above.
_EXCEPTIONS: dict[int, tuple[str, Action]] = {
    94: ("gpu_ecc_uncorrectable", "restart"),  # contained: the catalogue's action is RESTART_APP
    92: ("gpu_ecc_uncorrectable", "alert"),  # many single-bit errors
    63: ("gpu_row_remap", "alert"),  # a row was remapped as designed
    157: ("gpu_row_remap", "alert"),
    160: ("gpu_row_remap", "alert"),
    161: ("gpu_row_remap", "alert"),
    137: ("nvlink_error", "alert"),
    170: ("nvlink_error", "alert"),
}
_NVLINK_BY_TEXT = frozenset(range(144, 151))  # the message says whether the error is fatal
_RESET = frozenset({46, 110, 158, 168})
_RESTART = frozenset(
    {
        8, 11, 25, 32, 39, 40, 41, 56, 57, 58, 59, 60, 61, 65, 68, 69, 70, 71, 72, 73, 75, 76, 77,
        80, 81, 82, 83, 84, 85, 86, 88, 89, *range(96, 106), 123, *range(126, 136), 139, 151,
    }
)  # fmt: skip

_SXID_FATAL = frozenset({10003, 12020, 22003, 22011, *range(23001, 23018)})
_SXID_RECORD = frozenset(
    {
        11004, 11012, 11021, 11022, 11023, 12021, 12023, 12028, 15008, 15011, 19049, 19055, 19057,
        19059, 19062, 19065, 19068, 19071, 19084, 20001, 20009, 20012, 22013, 24001, 24002, 24003,
    }
)  # fmt: skip
_SXID_DRAIN = frozenset(
    {
        10001, 10002, 10004, 10005, 11001, 11009, 11013, 11018, 11019, 11020, 12001, 12002, 12022,
        12024, 12025, 12026, 12027, 12030, 12031, 12032, 14017, 15001, 15006, 15009, 15010, 15012,
        15013, 19047, 19048, 19054, 19056, 19058, 19060, 19061, 19063, 19064, 19066, 19067, 19069,
        19070, 20034, 22012, 24004, 24005, 24006, 24007,
    }
)  # fmt: skip


def numbered(line: str) -> Kind | None:
    """The kind of a line with an SXid or an Xid."""
    return sxid(line) or xid(line)


def xid(line: str) -> Kind | None:
    """The kind of a line with an Xid; None for one without a number."""
    found = _XID.search(line)
    if found is None and _DEVICE.search(line):
        found = _XID_TOLD.search(line)
    if found is None:
        return None
    number = int(found.group(1))
    if number in _NVLINK_BY_TEXT:
        fatal = _FATAL.search(line) is not None and _NON_FATAL.search(line) is None
        return _kind(f"xid-{number}", "nvlink_error", "root", "evict_restart" if fatal else "alert")
    return _xid(number)


@cache
def _xid(number: int) -> Kind:
    name = f"xid-{number}"
    if number == 45:  # cleanup of a channel after another error or the process' end
        return _kind(name, "teardown_secondary", "teardown", "none")
    if number == 154:  # states the recovery action for the errors before it
        return _kind(name, "gpu_recovery_action", "secondary", "alert")
    if number in {106, 107}:  # test messages
        return _kind(name, "benign", "benign", "none")
    if number in _EXCEPTIONS:
        category, action = _EXCEPTIONS[number]
        return _kind(name, category, "root", action)
    for category, (numbers, action) in _CATEGORIES.items():
        if number in numbers:
            return _kind(name, category, "root", action)
    if number in _RESET:
        return _kind(name, "gpu_channel_error", "root", "evict_restart")
    return _kind(name, "gpu_channel_error", "root", "restart" if number in _RESTART else "alert")


def sxid(line: str) -> Kind | None:
    """The kind of a line with an SXid; None for one without a number."""
    found = _SXID.search(line)
    if found is None:
        return None
    number = int(found.group(1))
    drains = number in _SXID_DRAIN or (number not in _SXID_RECORD and _FATAL.search(line))
    evicts = number in _SXID_FATAL or (drains and not _NON_FATAL.search(line))
    action: Action = "evict_restart" if evicts else "alert"
    return _kind(f"sxid-{number}", "nvlink_error", "root", action)


# cudaError_t of CUDA 10.1 and later; older releases had other numbers below 200.
_CUDA_CODE = re.compile(
    r"\b(?:cuda\w*|nccl|kernel|gpu)\b.{0,120}?\b(?:error|code|failure|status|result)\b[ :=(]*"
    r"(?:code[ :=(]*)?(\d{3})\b",
    re.IGNORECASE,
)
_CUDA: dict[int, tuple[str, Action]] = {
    214: ("gpu_ecc_uncorrectable", "evict_restart"),
    220: ("nvlink_error", "evict_restart"),
    222: ("driver_mismatch", "stop"),
    226: ("gpu_ecc_uncorrectable", "restart"),
    710: ("cuda_device_assert", "stop"),
    802: ("fabric_manager_failure", "evict_restart"),
    803: ("driver_mismatch", "evict_restart"),
    804: ("driver_mismatch", "stop"),
    **{code: ("cuda_illegal_access", "restart") for code in (700, 702, *range(714, 720))},
}


# Names of cudaError_t and CUresult without "cudaError" or "CUDA_ERROR_", cases and underscores.
_NAME = re.compile(r"\b(?:cudaError|CUDA_ERROR_)(\w+)")
_NAMED: dict[str, tuple[str, Action]] = {
    **dict.fromkeys(("memoryallocation", "outofmemory"), ("cuda_oom", "stop")),
    **dict.fromkeys(
        (
            "illegaladdress",
            "launchfailure",
            "launchfailed",
            "launchtimeout",
            "hardwarestackerror",
            "illegalinstruction",
            "misalignedaddress",
            "invalidaddressspace",
            "invalidpc",
        ),
        ("cuda_illegal_access", "restart"),
    ),
    "assert": ("cuda_device_assert", "stop"),
    "eccuncorrectable": ("gpu_ecc_uncorrectable", "evict_restart"),
    "contained": ("gpu_ecc_uncorrectable", "restart"),
    "nvlinkuncorrectable": ("nvlink_error", "evict_restart"),
    "systemnotready": ("fabric_manager_failure", "evict_restart"),
    "systemdrivermismatch": ("driver_mismatch", "evict_restart"),
    **dict.fromkeys(
        (
            "insufficientdriver",
            "compatnotsupportedondevice",
            "unsupportedptxversion",
            "callrequiresnewerdriver",
        ),
        ("driver_mismatch", "stop"),
    ),
    **dict.fromkeys(("devicesunavailable", "deviceunavailable"), ("gpu_busy", "restart")),
    **dict.fromkeys(
        (
            "initializationerror",
            "notinitialized",
            "nodevice",
            "invaliddevice",
            "stublibrary",
            "operatingsystem",
            "devicenotlicensed",
        ),
        ("gpu_init_failed", "restart"),
    ),
}


def cuda(line: str) -> Kind | None:
    """The kind of a line that has only the name or number of a CUDA error, not its text."""
    for found in _NAME.finditer(line):
        named = _NAMED.get(found.group(1).replace("_", "").lower())
        if named is not None:
            return Kind(f"cuda-{found.group(1)}"[:40], named[0], "root", named[1])
    code = _CUDA_CODE.search(line)
    number = int(code.group(1)) if code else 0
    if number not in _CUDA:
        return None
    category, action = _CUDA[number]
    return Kind(f"cuda-{number}", category, "root", action)


def _kind(name: str, category: str, role: Role, action: Action) -> Kind:
    return Kind(name, category, role, action, kernel=True)
