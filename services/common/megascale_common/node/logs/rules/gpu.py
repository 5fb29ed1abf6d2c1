"""Faults of GPUs and of their driver, after driver_types.h (CUDA 12.9) and the NVRM sources."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

GPU = (
    text("gpu-handle-absent", "gpu_init_failed", "root", "evict_restart", "device handle for",
         pattern=r"device handle for .*: Not Found", kernel=True),
    text("gpu-off-bus", "gpu_fallen_off_bus", "root", "evict_restart", "allen off the bus",
         "GPU is lost", "GPU_IS_LOST", "nable to determine the device handle",
         "GPU requires reset", kernel=True),
    text("gpu-remap-failed", "gpu_row_remap", "root", "evict_restart", "remap", "Remap",
         pattern=r"(?i)row[- ]?remap\w*:? (\w+ )?(failure|failed)|remapping failure occurred"
                 r"\W+yes", kernel=True),
    text("gpu-remap", "gpu_row_remap", "root", "alert", "remapping", "row remap",
         pattern=r"(?i)row remapper: .*marked for remapping|row remap(ping)?\b.*pending(?!\W+no)"
                 r"|pending row remap", kernel=True),
    text("gpu-page-retired", "gpu_ecc_uncorrectable", "root", "evict_restart",
         "double bit E", "double-bit E", "Double Bit E", "(DBE)",
         pattern=r"(?i)double[- ]bit (ecc )?error|\(DBE\) has been detected", kernel=True),
    text("gpu-exception", "gpu_sm_exception", "root", "restart", "Warp Exception",
         "Graphics Exception", "CUDA_EXCEPTION_",
         pattern=r"Graphics (SM Warp|SM Global)? ?Exception|CUDA_EXCEPTION_\d+"),
    text("gpu-ctxsw", "gpu_ctxsw_timeout", "root", "evict_restart", "CTX SWITCH TIMEOUT",
         "CTXSW_TIMEOUT", "ctxsw timeout", kernel=True),
    text("gpu-reset-required", "gpu_recovery_action", "root", "evict_restart", "RESET_REQUIRED",
         kernel=True),
    text("gpu-pmu-halt", "gpu_pmu_halt", "root", "evict_restart", "PmuHalted", "PMU has halted",
         "PMU halted",
         kernel=True),
    text("gpu-gsp-timeout", "gsp_rpc_timeout", "root", "evict_restart", "RPC from GSP",
         "RPC response from GPU", "GSP Timeout", "kgspIsHeartbeatTimedOut",
         "GSP RM heartbeat timed out", "waiting for GSP", "returned from rpcRm",
         "rpcRecvPoll timed", kernel=True),
    text("gpu-adapter", "gpu_init_failed", "root", "evict_restart", "NVRM",
         pattern=r"NVRM:.*(RmInitAdapter|rm_init_adapter|Cannot attach gpu|probe routine failed"
                 r"|nvidia_frontend_open.*failed)", kernel=True),
    text("driver-api-mismatch", "driver_mismatch", "root", "evict_restart", "API mismatch",
         kernel=True),
    text("cuda-ecc", "gpu_ecc_uncorrectable", "root", "evict_restart", "uncorrectable ECC",
         "ECC_UNCORRECTABLE", "ErrorECCUncorrectable",
         unless=r"Hardware Error|DIMM|\b(?:0|no) uncorrectable"),
    text("cuda-nvlink", "nvlink_error", "root", "evict_restart", "ErrorNvlinkUncorrectable",
         "ncorrectable NVLink error"),
    text("fabric-switch-fatal", "nvlink_error", "root", "evict_restart", "NVSwitch",
         pattern=r"NVSwitch (?:\d+ )?fatal error", kernel=True),
    text("fabric-switch", "nvlink_error", "root", "alert", "NVSwitch",
         pattern=r"NVSwitch non-fatal error", kernel=True),
    text("cuda-peer-memory", "nvlink_error", "root", "restart", "peer GPU memory over nvlink"),
    text("cuda-contained", "gpu_ecc_uncorrectable", "root", "restart", "cudaErrorContained"),
    text("nvml-mismatch", "driver_mismatch", "root", "evict_restart", "ersion mismatch",
         "does not match DSO version",
         pattern=r"(?i)driver/library version mismatch|does not match DSO version"),
    text("cuda-804", "driver_mismatch", "root", "stop", "forward compatibility was attempted",
         "ErrorCompatNotSupportedOnDevice", "unsupported toolchain", "UnsupportedPtxVersion",
         "UNSUPPORTED_PTX_VERSION"),
    text("cuda-803", "driver_mismatch", "root", "evict_restart", "unsupported display driver",
         "ErrorSystemDriverMismatch"),
    text("cuda-35", "driver_mismatch", "root", "stop", "insufficient for CUDA runtime",
         "ErrorInsufficientDriver", "unsatisfied condition", "driver on your system is too old"),
    text("fabric-no-switch", "fabric_manager_failure", "root", "alert", "NV_WARN_NOTHING_TO_DO"),
    text("cuda-802", "fabric_manager_failure", "root", "evict_restart",
         "system not yet initialized", "ErrorSystemNotReady", "ERROR_SYSTEM_NOT_READY"),
    text("fabric-manager", "fabric_manager_failure", "root", "evict_restart", "fabric",
         "Fabric Manager",
         pattern=r"(?i)failed to start .*fabric ?manager|fabric ?manager\b.*(don't match"
                 r"|doesn't match|mismatch|invalid value"
                 r"|status=\d+/FAILURE|failed|fatal|error|not (active|running|started)"
                 r"|inactive|unhealthy)"),
    text("fabric-manager-unit", "fabric_manager_failure", "root", "evict_restart",
         "nvidia-fabricmanager", pattern=r"nvidia-fabricmanager\S*:? .*([Ff]ailed|not found)"),
    text("driver-unreachable", "gpu_init_failed", "root", "evict_restart",
         "communicate with the NVIDIA driver", "river not loaded", "river Not Loaded",
         "modprobe", "nvidia-container-cli",
         pattern=r"communicate with the NVIDIA driver|(?i:nvml.*driver not loaded)"
                 r"|nvidia-container-cli: initialization error: (driver|nvml) error"
                 r"|nvidia-modprobe: unable to load|modprobe: .*(insert|Module) '?nvidia"),
    text("gpu-busy", "gpu_busy", "root", "restart", "busy or unavailable",
         "ErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    text("cuda-no-device", "gpu_init_failed", "root", "restart", "No CUDA GPUs are available",
         "no CUDA-capable device", "cudaErrorNoDevice", "cudaErrorInitializationError",
         "CUDA error: initialization error", "No devices were found", "CUDA_ERROR_NO_DEVICE",
         "CUDA unknown error", "CUDA driver initialization failed",
         "Failed to initialize NVML", "Found no NVIDIA driver", "failed call to cuInit",
         "could not select device driver", "from cudaGetDeviceCount", "CUDA_ERROR_NOT_INITIALIZED",
         "Cuda failure 'initialization error'", "Cuda failure 3 'initialization error'",
         "libcuda.so.1: cannot open", "ErrorOperatingSystem", "OS call failed",
         unless="nvidia-container-cli"),
    # Weak: the cause may stand on the next line.
    text("container-start", "gpu_init_failed", "root", "restart", "nvidia-container-cli",
         pattern=r"nvidia-container-cli\S*: \w+ error", weak=True),
    text("cuda-oom", "cuda_oom", "root", "stop", "CUDA out of memory", "ErrorMemoryAllocation",
         "CUDA error: out of memory", "STATUS_ALLOC_FAILED", "Cuda failure", "Failed to CUDA",
         "CUDA_ERROR_OUT_OF_MEMORY", "HIP out of memory", "OutOfMemoryError",
         "RESOURCE_EXHAUSTED", "cudaMalloc failed", "OOM when allocating tensor",
         "STATUS_NOT_INITIALIZED", "ResourceExhaustedError",
         pattern=r"OOM when allocating|out of memory"
                 r"|CUBLAS_STATUS_NOT_INITIALIZED(?=.*cublasCreate)(?!.*device-side assert)"
                 r"|ErrorMemoryAllocation|STATUS_ALLOC_FAILED|OUT_OF_MEMORY"
                 r"|Failed to CUDA (m|c)alloc|(?<!ray\.exceptions\.)OutOfMemoryError"
                 r"|RESOURCE_EXHAUSTED: Out of memory"),
    text("cuda-assert", "cuda_device_assert", "root", "stop", "device-side assert",
         "cudaErrorAssert", pattern=r"device-side assert(?!ions)|cudaErrorAssert"),
    text("cuda-illegal-access", "cuda_illegal_access", "root", "restart",
         "illegal memory access", "unspecified launch failure", "misaligned address",
         "al memory access was encountered",
         "ErrorIllegalAddress", "ErrorLaunchFailure", "ErrorMisalignedAddress",
         "illegal instruction was encountered", "ErrorIllegalInstruction",
         "ERROR_ILLEGAL_ADDRESS", "ERROR_LAUNCH_FAILED", "ERROR_MISALIGNED_ADDRESS",
         "ErrorInvalidPc", "ErrorInvalidAddressSpace", "ErrorHardwareStackError",
         "ErrorLaunchTimeout", "hardware stack error", "launch timed out and was terminated",
         "invalid program counter",
         "STATUS_EXECUTION_FAILED", "STATUS_MAPPING_ERROR", "operation not supported on global"),
    text("cupti-subscriber", "profiler_conflict", "root", "alert", "CUPTI",
         "ERR_NVGPUCTRPERM", "GPU Performance Counters", "Profiler is already enabled",
         "rofiler is already started",
         pattern=r"MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED|initialize CUPTI: 39"
                 r"|CUPTI_ERROR_(NOT_INITIALIZED|INSUFFICIENT_PRIVILEGES|MAX_LIMIT_REACHED)"
                 r"|ERR_NVGPUCTRPERM|GPU Performance Counters|rofiler is already"
                 r"|CUPTI (initialization|could not be loaded)|\bcupti\w*\)?\(.*\)? ?failed"
                 r"|[Ff]ailed to \w+ cupti\w+"),
)  # fmt: skip
