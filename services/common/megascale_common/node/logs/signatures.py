"""Signatures of faults in texts of workers' and kernel logs, in the order in which they are tried.

A signature has literals, of which a line must hold one, and a pattern that decides.
Texts of torch, NCCL (5067397), CUDA (driver_types.h 12.9), UCX, gloo, Slurm and Linux; kernel
conditions after Meta's GCM and Azure's HPC health checks. Numbered errors are in ``catalogue``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megascale_common.node.logs.categories import Action, Kind, Role


@dataclass(frozen=True, slots=True)
class Signature:
    """A kind of line, and how it is recognised."""

    kind: Kind
    literals: tuple[str, ...]
    pattern: re.Pattern[str] | None  # None: a literal suffices


def _text(
    name: str,
    category: str,
    role: Role,
    action: Action,
    *literals: str,
    pattern: str | None = None,
    kernel: bool = False,
    weak: bool = False,
) -> Signature:
    kind = Kind(name, category, role, action, kernel=kernel, weak=weak)
    return Signature(kind, literals, re.compile(pattern) if pattern else None)


# Known to be harmless, or only advice. First, so that no later pattern sees them.
_HARMLESS = (
    _text("advice-cuda", "benign", "advice", "none", "CUDA_LAUNCH_BLOCKING", "TORCH_USE_CUDA_DSA",
          "might be asynchronously reported", "CUDA kernel errors might be"),
    _text("advice-nccl", "benign", "advice", "none", "NCCL_DEBUG",
          pattern=r"^You can use NCCL_DEBUG|^\W*Set NCCL_DEBUG"),
    _text("peermem-context", "benign", "benign", "none", "nv_get_p2p_free_callback"),
    _text("mlx5-access-reg", "benign", "benign", "none", "ACCESS_REG",
          pattern=r"mlx5_cmd_out_err.*ACCESS_REG.*failed"),
    _text("group-not-destroyed", "benign", "benign", "none", "process group has NOT been destroyed",
          "destroy_process_group() was not called"),
    _text("socket-retry", "benign", "benign", "none", "socket.cpp",
          pattern=r"\[W[^\]]*socket\.cpp:\d+\].*(cannot be initialized|has failed to connect"
                  r"|not yet listening)"),
    _text("gradient-overflow", "benign", "benign", "none", "Gradient overflow", "OVERFLOW! Rank"),
    _text("peer-access-missing", "benign", "benign", "none", "Custom allreduce",
          pattern=r"Setup Custom allreduce failed|Custom allreduce is disabled"),
    _text("nfs-recovered", "benign", "benign", "none", "nfs: server",
          pattern=r"nfs: server \S+ OK"),
    # What is left on NFS of a file that was removed while open: its removal fails, nothing else.
    _text("nfs-removed", "benign", "benign", "none", "resource busy",
          pattern=r"resource busy: '\S*\.nfs[0-9a-f]+"),
    _text("framework-noise", "benign", "benign", "none", "Unable to register cu",
          "placer already registered", "read from SysFS had negative value",
          "Failed to load image Python extension", "couldn't load driver 'lib",
          "XDG_RUNTIME_DIR not set", "loss scaler reducing", "perf: interrupt took too long",
          "Could not load dynamic library", "ACPI Error", "ACPI BIOS Error",
          "lowering kernel.perf_event"),
)  # fmt: skip

_GPU = (
    _text("gpu-off-bus", "gpu_fallen_off_bus", "root", "evict_restart", "allen off the bus",
          "GPU is lost", "GPU_IS_LOST", "nable to determine the device handle",
          "GPU requires reset", kernel=True),
    _text("gpu-remap-failed", "gpu_row_remap", "root", "evict_restart", "remap", "Remap",
          pattern=r"(?i)row[- ]remap\w*:? (failure|failed)", kernel=True),
    _text("gpu-remap", "gpu_row_remap", "root", "alert", "remapping", "Row Remapper",
          pattern=r"(?i)row remapper: .*marked for remapping|row remapping.*pending"
                  r"|pending row remap", kernel=True),
    _text("gpu-page-retired", "gpu_ecc_uncorrectable", "root", "evict_restart",
          "double bit E", "double-bit E", "Double Bit E", "(DBE)",
          pattern=r"(?i)double[- ]bit (ecc )?error|\(DBE\) has been detected", kernel=True),
    _text("gpu-exception", "gpu_sm_exception", "root", "restart", "Warp Exception",
          "Graphics Exception", "CUDA_EXCEPTION_",
          pattern=r"Graphics (SM Warp|SM Global)? ?Exception|CUDA_EXCEPTION_\d+"),
    _text("gpu-ctxsw", "gpu_ctxsw_timeout", "root", "evict_restart", "CTX SWITCH TIMEOUT",
          "CTXSW_TIMEOUT", "ctxsw timeout", kernel=True),
    _text("gpu-reset-required", "gpu_recovery_action", "root", "evict_restart", "RESET_REQUIRED",
          kernel=True),
    _text("gpu-pmu-halt", "gpu_pmu_halt", "root", "evict_restart", "PmuHalted", "PMU has halted",
          kernel=True),
    _text("gpu-gsp-timeout", "gsp_rpc_timeout", "root", "evict_restart", "RPC from GSP",
          "RPC response from GPU", "GSP Timeout", "kgspIsHeartbeatTimedOut",
          "GSP RM heartbeat timed out", "waiting for GSP", kernel=True),
    _text("gpu-adapter", "gpu_init_failed", "root", "evict_restart", "NVRM",
          pattern=r"NVRM:.*(RmInitAdapter|rm_init_adapter|Cannot attach gpu|probe routine failed"
                  r"|nvidia_frontend_open.*failed)", kernel=True),
    _text("driver-api-mismatch", "driver_mismatch", "root", "evict_restart", "API mismatch",
          kernel=True),
    _text("cuda-ecc", "gpu_ecc_uncorrectable", "root", "evict_restart", "uncorrectable ECC",
          "ECC_UNCORRECTABLE", "ErrorECCUncorrectable"),
    _text("cuda-nvlink", "nvlink_error", "root", "evict_restart", "ErrorNvlinkUncorrectable",
          "ncorrectable NVLink error"),
    _text("fabric-switch-fatal", "nvlink_error", "root", "evict_restart", "NVSwitch",
          pattern=r"NVSwitch fatal error", kernel=True),
    _text("fabric-switch", "nvlink_error", "root", "alert", "NVSwitch",
          pattern=r"NVSwitch non-fatal error", kernel=True),
    _text("cuda-peer-memory", "nvlink_error", "root", "restart", "peer GPU memory over nvlink"),
    _text("cuda-contained", "gpu_ecc_uncorrectable", "root", "restart", "cudaErrorContained"),
    _text("nvml-mismatch", "driver_mismatch", "root", "evict_restart", "ersion mismatch",
          "does not match DSO version",
          pattern=r"(?i)driver/library version mismatch|does not match DSO version"),
    _text("cuda-804", "driver_mismatch", "root", "stop", "forward compatibility was attempted",
          "ErrorCompatNotSupportedOnDevice", "unsupported toolchain", "UnsupportedPtxVersion",
          "UNSUPPORTED_PTX_VERSION"),
    _text("cuda-803", "driver_mismatch", "root", "evict_restart", "unsupported display driver",
          "ErrorSystemDriverMismatch"),
    _text("cuda-35", "driver_mismatch", "root", "stop", "insufficient for CUDA runtime",
          "ErrorInsufficientDriver", "driver on your system is too old"),
    _text("fabric-no-switch", "fabric_manager_failure", "root", "alert", "NV_WARN_NOTHING_TO_DO"),
    _text("cuda-802", "fabric_manager_failure", "root", "evict_restart",
          "system not yet initialized", "ErrorSystemNotReady", "ERROR_SYSTEM_NOT_READY"),
    _text("fabric-manager", "fabric_manager_failure", "root", "evict_restart", "fabric",
          "Fabric Manager",
          pattern=r"(?i)fabric ?manager\b.*(don't match|doesn't match|mismatch|invalid value"
                  r"|status=\d+/FAILURE|failed|fatal|error)"),
    _text("fabric-manager-unit", "fabric_manager_failure", "root", "evict_restart",
          "nvidia-fabricmanager", pattern=r"nvidia-fabricmanager\S*:? .*([Ff]ailed|not found)"),
    _text("driver-unreachable", "gpu_init_failed", "root", "evict_restart",
          "communicate with the NVIDIA driver", "river not loaded", "river Not Loaded",
          pattern=r"communicate with the NVIDIA driver|(?i:nvml.*driver not loaded)"),
    _text("gpu-busy", "gpu_busy", "root", "restart", "busy or unavailable",
          "ErrorDevicesUnavailable"),
    _text("cuda-no-device", "gpu_init_failed", "root", "restart", "No CUDA GPUs are available",
          "no CUDA-capable device", "cudaErrorNoDevice", "cudaErrorInitializationError",
          "CUDA error: initialization error", "No devices were found", "CUDA_ERROR_NO_DEVICE",
          "CUDA unknown error", "CUDA driver initialization failed",
          "Failed to initialize NVML", "Found no NVIDIA driver", "failed call to cuInit",
          "nvidia-container-cli",
          "could not select device driver", "from cudaGetDeviceCount", "CUDA_ERROR_NOT_INITIALIZED",
          "Cuda failure 'initialization error'", "Cuda failure 3 'initialization error'",
          "libcuda.so.1: cannot open", "ErrorOperatingSystem", "OS call failed",
          pattern=r"^(?!.*nvidia-container-cli)|nvidia-container-cli\S*: \w+ error"),
    _text("cuda-oom", "cuda_oom", "root", "stop", "CUDA out of memory", "ErrorMemoryAllocation",
          "CUDA error: out of memory", "STATUS_ALLOC_FAILED", "Cuda failure", "Failed to CUDA",
          "CUDA_ERROR_OUT_OF_MEMORY", "HIP out of memory", "OutOfMemoryError",
          "RESOURCE_EXHAUSTED", "cudaMalloc failed", "OOM when allocating tensor",
          "STATUS_NOT_INITIALIZED", "ResourceExhaustedError",
          pattern=r"OOM when allocating|CUBLAS_STATUS_NOT_INITIALIZED|out of memory"
                  r"|ErrorMemoryAllocation|STATUS_ALLOC_FAILED|OUT_OF_MEMORY"
                  r"|Failed to CUDA (m|c)alloc|OutOfMemoryError|RESOURCE_EXHAUSTED: Out of memory"),
    _text("cuda-assert", "cuda_device_assert", "root", "stop", "device-side assert",
          "cudaErrorAssert"),
    _text("cuda-illegal-access", "cuda_illegal_access", "root", "restart",
          "illegal memory access", "unspecified launch failure", "misaligned address",
          "ErrorIllegalAddress", "ErrorLaunchFailure", "ErrorMisalignedAddress",
          "illegal instruction was encountered", "ErrorIllegalInstruction",
          "ERROR_ILLEGAL_ADDRESS", "ERROR_LAUNCH_FAILED", "ERROR_MISALIGNED_ADDRESS",
          "ErrorInvalidPc", "ErrorInvalidAddressSpace", "ErrorHardwareStackError",
          "ErrorLaunchTimeout", "launch timed out and was terminated", "invalid program counter",
          "STATUS_EXECUTION_FAILED", "STATUS_MAPPING_ERROR", "operation not supported on global"),
    _text("cupti-subscriber", "profiler_conflict", "root", "alert", "CUPTI",
          "ERR_NVGPUCTRPERM", "GPU Performance Counters", "Profiler is already enabled",
          "rofiler is already started",
          pattern=r"MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED|initialize CUPTI: 39"
                  r"|CUPTI_ERROR_(NOT_INITIALIZED|INSUFFICIENT_PRIVILEGES|MAX_LIMIT_REACHED)"
                  r"|ERR_NVGPUCTRPERM|GPU Performance Counters|rofiler is already"
                  r"|CUPTI (initialization|could not be loaded)|cupti\w*\(.*\)? ?failed"),
)  # fmt: skip

_HOST = (
    _text("dimm-cper-ue", "host_dimm_ue", "root", "evict_restart", "multi-bit ECC",
          pattern=r"\[Hardware Error\].*multi-bit ECC", kernel=True),
    _text("dimm-cper-ce", "host_dimm_ce", "root", "alert", "single-bit ECC",
          pattern=r"\[Hardware Error\].*single-bit ECC", kernel=True),
    _text("dimm-ue", "host_dimm_ue", "root", "evict_restart", "EDAC", "Memory failure: 0x",
          "Uncorrected error", "ncorrected hardware memory error", "ncorrectable memory error",
          "hardware memory corruption", "Uncorrectable ECC",
          pattern=r"hardware memory corruption|(Memory|DIMM).*Uncorrectable ECC|EDAC .*\b\d+ UE\b"
                  r"|Memory failure: 0x|Uncorrected error\s*$"
                  r"|[Uu]ncorrected hardware memory|[Uu]ncorrectable memory error", kernel=True),
    _text("dimm-ce", "host_dimm_ce", "root", "alert", "EDAC", "orrected memory error",
          "orrected error, no action", "orrected read error", "MEMORY CONTROLLER",
          pattern=r"EDAC .*\b\d+ CE\b|EDAC .*HANDLING MCE MEMORY|\bCorrected memory error"
                  r"|\bCorrected error, no action.*\b(memory|Memory)|\bCorrected read error"
                  r"|MEMORY CONTROLLER \w+_CHANNEL",
          kernel=True),
    _text("cper-fatal", "host_hardware_error", "root", "evict_restart", "Hardware Error",
          pattern=r"event severity: fatal", kernel=True),
    _text("cper", "host_hardware_error", "root", "alert", "Hardware Error",
          pattern=r"event severity: recoverable|Machine [Cc]heck|error from APEI"
                  r"|MC\d+_STATUS\[", kernel=True,
          weak=True),
    _text("host-stall", "host_lockup", "root", "alert", "detected stall", "rcu_",
          pattern=r"rcu\w*:? .*detected (expedited )?stalls?|self-detected stall", kernel=True),
    _text("kernel-oops", "host_lockup", "root", "evict_restart", "kernel BUG at", "Oops: ",
          "general protection fault,",
          pattern=r"kernel BUG at|\bOops: [0-9a-f]{4} \[#\d+\]"
                  r"|(?<!traps: )general protection fault, ", kernel=True),
    _text("lockup", "host_lockup", "root", "evict_restart", "oft lockup", "hard LOCKUP",
          "ernel panic", "ernel Panic", "BUG: unable to handle", kernel=True),
    _text("hung-task", "host_hung_task", "root", "alert", "blocked for more than",
          "hung_task_timeout_secs", kernel=True),
    _text("host-oom", "host_oom", "root", "restart", "ut of memory: Kill", "oom-kill",
          "out-of-memory handler", "oom_kill event", "OOM Killed", "OOMKilled", ": Out Of Memory",
          kernel=True),
    _text("pcie-fatal", "pcie_error", "root", "evict_restart", "AER:", "PCIe Bus Error",
          pattern=r"AER: .*\((Fatal|fatal)\)|Uncorrected \(Fatal\)|Uncorrectable \(Fatal\)",
          kernel=True),
    _text("pcie", "pcie_error", "root", "alert", "AER:", "PCIe Bus Error", kernel=True),
    _text("disk-failed", "host_disk_failed", "root", "evict_restart", "ilesystem",
          "Disk failure on", "after reset failure", "after probe failure", "Corruption detected",
          "etadata corruption",
          pattern=r"XFS .*([Cc]orruption (of|detected)|Metadata corruption)"
                  r"|Remounting filesystem read-only|XFS .*Shutting down filesystem"
                  r"|md/raid.*Disk failure on|Disabling device after reset failure"
                  r"|Removing after probe failure", kernel=True),
    _text("disk", "host_disk_failed", "root", "alert", "Buffer I/O error", "reset controller",
          "timeout, aborting", "timeout, disable controller", "I/O error, dev",
          "Identify Controller failed", "controller is down; will reset", "aborting reset",
          "timeout, completion polled", "critical medium error", "critical target error",
          "EXT4-fs error", "metadata I/O error", "BTRFS error", "Unrecovered read error",
          "failed command: ", "exception Emask", kernel=True),
    _text("nic-power", "pcie_error", "root", "alert", "insufficient power on the PCIe",
          kernel=True),
    _text("nccl-segv", "unknown", "root", "alert", "in libnccl.so"),
)  # fmt: skip

_WC = r"Got completion .*(?:status=(?:IBV_WC_\w+\()?|with error ){}\b"
_NETWORK = (
    _text("rdma-flush", "rdma_flush_secondary", "secondary", "none", "Got completion",
          "Work Request Flushed", "WR_FLUSH_ERR", "WR Flush",
          pattern=_WC.format("5") + r"|(?i:Work Request Flushed|WR_FLUSH_ERR|WR Flush)"),
    _text("rdma-protection", "rdma_local_protection", "root", "restart", "Got completion",
          "local protection", "Local protection", "local access violation", "LOC_PROT_ERR",
          pattern=_WC.format("4") + r"|[Ll]ocal protection|local access violation|LOC_PROT_ERR"),
    _text("rdma-remote", "rdma_remote_error", "secondary", "none", "Got completion",
          "REM_ACCESS_ERR", "REM_INV_REQ", "REM_OP_ERR", "emote access error",
          "emote invalid request", "emote operation error", "Remote access on",
          pattern=_WC.format("(?:9|10|11)") + r"|REM_(ACCESS|INV_REQ|OP)_?(ERR)?"
                  r"|[Rr]emote (access (error|on)|invalid request|operation error)"),
    _text("rdma-retry", "rdma_retry_exceeded", "root", "restart", "Got completion",
          "retry count", "RETRY_EXC_ERR", "retry exceeded",
          pattern=_WC.format("1[23]") + r"|(?i:(transport|RNR) retry count)|RETRY_EXC_ERR"
                  r"|(transport|RNR|rnr) retry exceeded", weak=True),
    _text("rdma-device", "rdma_device_fatal", "root", "evict_restart", "Got async", "async fatal",
          "mlx5_core", "LOCAL CATASTROPHIC", "EVENT_DEVICE_FATAL",
          pattern=r"(?i:local catastrophic error|async fatal event|device fatal)|DEVICE_FATAL"
                  r"|mlx5_core .*(health compromised|firmware internal error"
                  r"|Fatal error \d+ detected|device's health compromised)"),
    _text("nic-stalls", "rdma_device_fatal", "root", "alert", "NETDEV WATCHDOG",
          "TX timeout detected",
          "assert_var", "wait_func",
          pattern=r"NETDEV WATCHDOG|TX timeout detected|mlx5\w* .*(assert_var|wait_func.* timeout)",
          kernel=True),
    _text("rdma-port", "rdma_link_flap", "root", "alert", "port error", "lost carrier", "ink DOWN",
          "ink Down", "ink down", "ink is Down", "definitely down", "Cable unplugged",
          "EVENT_PORT_ERR", "High Temperature", "to DOWN", "arrier lost",
          pattern=r"async (error )?event.*port error|[Ll]ost carrier|Link (is )?(DOWN|[Dd]own)"
                  r"|link status definitely down|Cable unplugged|EVENT_PORT_ERR"
                  r"|[Pp]ort \d+.*(state )?changed? (state )?to DOWN|[Cc]arrier lost"
                  r"|Port module event.*High Temperature"),
    _text("rdma-qp", "rdma_qp_setup_failed", "root", "restart", "ibv_modify_qp", "modify QP",
          "ibv_create_qp", "ibv_create_ah", "ibv_query_gid", "create QP",
          "rdma_resolve_", "change QP", "failed to create", "obj_create(QP)",
          pattern=r"ibv_modify_qp\S* failed|([Ff]ailed|[Uu]nable) to (modify|create"
                  r"|change) (\w+ )?QP"
                  r"|obj_create\(QP\) failed|ibv_(create_ah|query_gid)\S* failed"
                  r"|[Cc]ouldn't create QP"
                  r"|rdma_resolve_(addr|route)\S* .*(failed|error)"
                  r"|ibv_create_qp\S* failed(?!.*Cannot allocate memory)"),
    _text("rdma-memlock", "memlock_limit", "root", "stop", "Cannot allocate memory", "MEMLOCK",
          "max locked memory", "allocate some locked memory", "locked memory limit", "mlock",
          pattern=r"(ibv_(exp_)?reg_\w*mr|ibv_create_(cq|qp)|ibv_reg_mr_iova2?)\b.*Cannot allocate"
                  r"|RLIMIT_MEMLOCK|max locked memory|locked memory limit"
                  r"|allocate some locked memory|\bmlock(all)?\b.*(failed|Cannot allocate)"),
    _text("rdma-mr-limit", "rdma_mr_limit", "root", "stop", "MKEY", "reg mr failed",
          pattern=r"CREATE_MKEY.*failed|reg mr failed", kernel=True),
    _text("nccl-net-count", "rdma_device_fatal", "root", "alert",
          "mixed local Net device counts"),
    _text("nccl-no-net", "rdma_device_fatal", "root", "alert", "NCCL WARN NET/IB",
          pattern=r"No device found|Unable to open device"),
)  # fmt: skip

_COMMUNICATION = (
    _text("duplicate-gpu", "config_duplicate_gpu", "root", "stop", "Duplicate GPU detected"),
    _text("nccl-version", "config_version_drift", "root", "stop", "Mismatched NCCL version"),
    _text("collective-mismatch", "collective_mismatch", "root", "stop",
          "mismatch between collectives", "Mismatched collective", "ollective operation counts",
          "inconsistent", "appears not to match", "Mismatched allreduce", "Mismatched allgather",
          "Mismatched broadcast", "Mismatched data types", "essage truncated", "preamble.length",
          "mismatch in rank count",
          pattern=r"mismatch between collectives|Mismatched (collective|allreduce|allgather"
                  r"|broadcast|data types)|ollective operation counts|has inconsistent \d+ params"
                  r"|appears not to match (sizes|strides) of the same param|[Mm]essage truncated"
                  r"|op\.preamble\.length <= op\.nbytes|mismatch in rank count"),
    _text("shm-full", "shm_exhausted", "root", "stop", "No space left on device",
          pattern=r"(/dev/shm|</torch_|/psm_|'/torch_).*No space left"
                  r"|No space left on device.*(/dev/shm|</torch_|/psm_|'/torch_)"),
    _text("shm-gone", "shm_attach_failed", "root", "restart", "open shared memory object",
          "'/psm_", pattern=r"open shared memory object .*No such file|No such file.*'/psm_"),
    _text("files-open", "file_limit", "root", "stop", "oo many open files", "file-max limit",
          "items of ancdata"),
    _text("shm-exhausted", "shm_exhausted", "root", "stop", "creating shared memory segment",
          "failed to extend /dev/shm", "insufficient shared memory", "out of shared memory",
          "signal: Bus error", "posix_fallocate failed", "unable to mmap", "unable to allocate sha",
          pattern=r"NCCL WARN|shared memory|Bus error|/dev/shm|</torch_"),
    _text("shm-attach", "shm_attach_failed", "root", "restart", "attaching to shared memory"),
    _text("timeout-collective", "collective_timeout", "secondary", "restart",
          "collective operation timeout", "checkTimeout", "raised from ncclCommWatchdog",
          "either an error or timeout", "detected by watchdog", "Timed out waiting",
          "imeout at NCCL work",
          "timeout caused pair closure", "tensors were submitted to be reduced", "Stalled ranks",
          "Stalled ops", "barrier timed out", "timed out in barrier",
          pattern=r"tensors were submitted to be (reduced|broadcast)|Stalled (ranks|ops)"
                  r"|barrier timed out|timed out in barrier|operation timeout|checkTimeout"
                  r"|ncclCommWatchdog|error or timeout"
                  r"|failure detected by watchdog at work"
                  r"|imeout at NCCL work|timeout caused pair closure"
                  r"|Timed out waiting \d+ms for (recv|send)"),
    _text("watchdog-stuck", "watchdog_stuck", "secondary", "restart", "watchdog got stuck",
          "Heartbeat monitor timed out", "no heartbeat of its watchdog",
          "preparing to dump debug info", "Could not acquire GIL", "watchdog hang",
          "watchdog thread heartbeat", "watchdog thread may be stuck"),
    _text("rendezvous-closed", "rendezvous_closed", "secondary", "restart",
          "RendezvousClosedError"),
    _text("rendezvous-timeout", "rendezvous_timeout", "root", "restart", "RendezvousTimeoutError",
          "RendezvousConnectionError", "client socket has timed out", "wait timeout after",
          "DistStoreError", "failed to connect/validate", "store based barrier", "to any network",
          "Socket Timeout", "connect() timed out", "connectFullMesh failed",
          "No route to host", "Connection timed out", "Network is unreachable", "TCPStore",
          "waitForInput", "Name or service not known", "failure in name resolution",
          "host not found", "getaddrinfo failed",
          pattern=r"(?i:connect) .*(Connection timed out|No route to host|Network is unreachable)"
                  r"|NCCL WARN .*(Connection timed out|No route to host|Network is unreachable)"
                  r"|TCPStore.*timed out|waitForInput: .*timed out|Name or service not known"
                  r"|failure in name resolution|host not found|getaddrinfo failed"
                  r"|Rendezvous\w+Error|socket has timed out|wait timeout after|Socket Timeout"
                  r"|waiting for (workers|clients)|connect/validate|Timed out initializing"
                  r"|failed to connect to any network|connect\(\) timed out|connectFullMesh failed",
          weak=True),
    _text("port-in-use", "port_in_use", "root", "restart", "ddress already in use", "EADDRINUSE"),
)  # fmt: skip

_FILES_AND_NUMBERS = (
    _text("storage-quota", "storage_quota", "root", "stop", "quota exceeded", "EDQUOT", "Errno 122",
          pattern=r"[Qq]uota exceeded|EDQUOT|Errno 122"),
    _text("storage-stale", "storage_stale_handle", "root", "restart", "tale file handle",
          "tale NFS file handle", "Errno 116"),
    _text("storage-gone", "storage_unreachable", "root", "alert", "nfs: server",
          "endpoint is not connected", "endpoint shutdown", "LustreError", "Lustre:",
          "libceph", "ceph:", "was evicted by", "beegfs", "mount.nfs",
          pattern=r"libceph: (osd\d+.*(down|timed out|socket closed|socket error)|mon\d+.*"
                  r"session lost)|ceph: .*(hung|caps stale|timed out)|client was evicted by"
                  r"|beegfs.*([Cc]ommunication error|not reachable)|mount\.nfs.*timed out"
                  r"|not responding|not connected|endpoint shutdown"
                  r"|Lustre.*(was lost|timed out|operation .* failed)"),
    _text("storage-full", "storage_write_failed", "root", "stop", "No space left on device",
          "ENOSPC", "StorageFull", weak=True),
    _text("storage-object", "storage_write_failed", "root", "restart", "when calling the",
          "S3UploadFailedError", "minReplication", "could only be replicated to",
          "botocore.exceptions", "google.api_core.exceptions", "google.cloud.storage",
          "azure.core.exceptions", "gcsfs.retry", "AzureHttpError", "HdfsError",
          pattern=r"when calling the (PutObject|UploadPart\w*|CreateMultipartUpload"
                  r"|CompleteMultipartUpload|CopyObject) operation|S3UploadFailedError"
                  r"|to 0 (of the \d+ minReplication )?nodes"
                  r"|botocore\.exceptions\.(\w*Timeout\w*|EndpointConnection\w*|ConnectionClosed\w*"
                  r"|ResponseStreaming\w*|HTTPClientError|SSLError|IncompleteReadError)"
                  r"|google\.api_core\.exceptions\.(ServiceUnavailable|TooManyRequests"
                  r"|GatewayTimeout"
                  r"|InternalServerError|RetryError)|azure\.core\.exceptions\.(Service\w+|Http\w+)"
                  r"|gcsfs\.retry\.HttpError|AzureHttpError|hdfs\.util\.HdfsError"),
    _text("storage-write", "storage_write_failed", "root", "restart", "StreamWriter failed",
          "unexpected pos", "nput/output error", "cannot be opened", "ead-only file system",
          "Remote I/O error", "iostream error", "SafetensorError", "IoError",
          pattern=r"iostream error|(SafetensorError|IoError).*(code: 5\b|I/O error|Input/output)"
                  r"|StreamWriter failed writing|unexpected pos \d+|\[Errno 5\]"
                  r"|write\(\).*Input/output error|^RuntimeError: File \S+ cannot be opened"
                  r"|\bOSError.*[Rr]ead-only file system|Remote I/O error"),
    _text("nan", "numeric_nan", "root", "stop", "NaN", "nan", "NAN", "Invalid loss",
          "not finite", "on-finite", "Minimum loss scale reached", "loss scale already at minimum",
          "NanLossDuring", "`nan`", "NaN or Inf found", "NaN detected", "nan detected", "Nan/Inf",
          pattern=r"NaN or Inf found|^\s*(step )?\d+[ \t:,]+nan\s*$|Minimum loss scale reached"
                  r"|loss scale already at minimum|NanLossDuring"
                  r"|contains either `inf`, `nan`|(?i:(?<!no )\bnans? (loss|gradients?"
                  r"|values?)? ?(was |were )?"
                  r"(detected|encountered|found) (in|at|for|during))|(?i:(detected|found) nans? )"
                  r"|gradients are Nan/Inf|total norm .*is non-finite|diverged with loss = NaN"
                  r"|found NaN|(became|is) (infinite or )?NaN|NaN or Inf (found )?in (loss|grad)"
                  r"|(?i:(grad[_ ]norm|\bloss)['\"]?[:=] ?nan\b)|Unexpected result nan"
                  r"|(?i:loss (is|=) ?(nan|inf)\b)|Invalid loss, terminating"
                  r"|returned nan values in|(?i:loss is (not finite|non-finite))"),
)  # fmt: skip

_ENDS = (
    _text("slurm-preempted", "scheduler_preempted", "root", "restart", "CANCELLED AT",
          "job is preempted", "Node failure on", pattern=r"DUE TO (PREEMPTION|JOB REQUEUE"
                  r"|NODE FAILURE)|preempted|Node failure on"),
    _text("slurm-ended", "scheduler_ended", "root", "none", "CANCELLED AT"),
    _text("sigkill", "sigkill_unknown", "secondary", "restart", "xitcode", "SIGKILL",
          "signal: Killed", "Killed", "exit code 137", "ignal 9",
          "return code = -9", "xit code: 137", "xited with code 137", "xit status 137",
          "xitCode", "was sent SIGKILL", "(SIGKILL)",
          pattern=r"\btasks? \S+: Killed|(?i:exit(ed with)? ?(code|status):? ?137\b)"
                  r"|was sent SIGKILL|\(SIGKILL\)|exitcode\s*: -9\b|[Ss]ignal 9\b"
                  r"|Signals\.SIGKILL|signal: Killed|^\s*Killed\s*$"
                  r"|line \d+:\s+\d+ Killed|exit code 137|return code = -9\b"),
    _text("peer-closed", "peer_closed_secondary", "secondary", "none", "Connection closed by",
          "onnection reset by peer", "Broken pipe", "Socket recv failed", "ncclRemoteError",
          "remote process exited", "sendBytes failed", "recvValue failed", "[Proxy Service",
          "[Service thread] E", "[Service thread] C", "Connection refused",
          "Proxy Call to rank", "monitoredBarrier", "got 0 bytes", "Socket closed",
          "lost communication with", "HorovodInternalError", "onnection was closed by",
          "Software caused connection abort", "closed the connection", "Horovod has been shut down",
          "ranks finished execution",
          pattern=r"UNAVAILABLE.*Socket closed|lost communication with a remote"
                  r"|HorovodInternalError"
                  r"|Horovod has been shut down|ranks finished execution"
                  r"|Software caused connection abort|peer closed the connection"
                  r"|Connection closed by (remote )?peer|reset by peer|Broken pipe|recv failed"
                  r"|ncclRemoteError|remote process exited|sendBytes|recvValue"
                  r"|WARN \[(Proxy Service|Service thread)|\bWARN .*Connection refused"
                  r"|Proxy Call to rank \d+ failed|reached monitoredBarrier, but received errors"
                  r"|[Ff]ailed to recv, got 0 bytes"),
    _text("teardown", "teardown_secondary", "teardown", "none", "death signal", "closing signal",
          "via signal SIG", "nable to shutdown processes", "Sending processes ",
          "[Service thread] Connection closed", "Abort COMPLETE", "entire process down",
          "NCCL operations have failed", "SignalException", "KeyboardInterrupt",
          "Worker group FAILED", "Waiting up to", "leaked semaphore", "Force Terminated",
          "Terminating job step", "] Killing subprocess", "exitcode: -15", "exitcode  : -15",
          "15 (SIGTERM)", "communicator was aborted", "forcing job termination",
          "MPI_ABORT was invoked", "MPI_Abort("),
)  # fmt: skip

SIGNATURES: tuple[Signature, ...] = (
    *_HARMLESS, *_GPU, *_HOST, *_NETWORK, *_COMMUNICATION, *_FILES_AND_NUMBERS, *_ENDS,
)  # fmt: skip

# A line that ends something and that no signature knows; the weak form only wraps another line.
WRAPPER = Kind("unknown-wrapper", "unknown", "root", "alert", weak=True)
FATAL = Kind("unknown-fatal", "unknown", "root", "alert")
FATAL_LITERALS = ("rror", "ERROR", "xception", "atal", "FATAL", "NCCL WARN", "terminate called",
                  "egmentation fault", "core dumped", "corruption", "heck failed", "xitcode",
                  "Root Cause", "ASSERT FAILED", " WARN ", "unexpected system error",
                  "ncclCommInit",
                  "interface found")  # fmt: skip
IGNORED = re.compile(
    r"NCCL INFO|^frame #\d|During handling of the above|another exception occurred"
    r"|\[Hardware Error\]|\b(?:0|no) errors?\b|stack trace: \*\*\*|^\s+File \""
    r"|(?i:\berrors?[=:] ?0\b)|\[?(?:INFO|DEBUG)\b|\b\w*Warning:"
)
WRAPPERS = re.compile(
    r"terminate called|exitcode|ChildFailedError|DistBackendError|ncclInvalidUsage|Last error"
    r"|watchdog thread terminated|raised from|Root Cause|^Traceback|ncclSystemError"
    r"|unhandled system error|ncclInternalError|tasks? .*[Ee]xited|errors\.error_handler"
    r"|error_handler: \{|Connect to \S+ failed"
)
FATAL_PATTERN = re.compile(
    r"\b\w*(?:Error|Exception)\b|\b(?:ERROR|FATAL|[Ff]atal|[Ee]rror:)|NCCL WARN|terminate called"
    r"|[Ss]egmentation fault|core dumped|corruption|[Cc]heck failed|exitcode|Root Cause"
    r"|INTERNAL ASSERT FAILED|\.(?:h|cc|cu):\d+ WARN |unexpected system error"
    r"|ncclCommInit\w*\(.*\) failed|no socket interface found"
)
