"""Texts that look like trouble and are none, and hints: tried first."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

HARMLESS = (
    text("advice-cuda", "benign", "advice", "none", "CUDA_LAUNCH_BLOCKING", "TORCH_USE_CUDA_DSA",
         "might be asynchronously reported", "CUDA kernel errors might be",
         unless=r"\b(CUDA|HIP) (runtime )?error\b"),  # else the error is on the same line
    text("advice-nccl", "benign", "advice", "none", "NCCL_DEBUG",
         pattern=r"^You can use NCCL_DEBUG|^\W*Set NCCL_DEBUG"),
    text("peermem-context", "benign", "benign", "none", "nv_get_p2p_free_callback"),
    text("mlx5-access-reg", "benign", "benign", "none", "ACCESS_REG",
         pattern=r"mlx5_cmd_out_err.*ACCESS_REG.*failed"),
    text("left-at-exit", "benign", "benign", "none", "process group has NOT been destroyed",
         "destroy_process_group() was not called", "leaked semaphore", "leaked shared_memory"),
    text("retried", "benign", "benign", "none", "Retrying (Retry(total="),
    text("socket-retry", "benign", "benign", "none", "socket.cpp",
         pattern=r"\[W[^\]]*socket\.cpp:\d+\].*(cannot be initialized|has failed to connect"
                 r"|not yet listening)"),
    text("gradient-overflow", "benign", "benign", "none", "Gradient overflow", "OVERFLOW! Rank",
         unless=r"loss=nan\b"),
    text("peer-access-missing", "benign", "benign", "none", "Custom allreduce",
         pattern=r"Setup Custom allreduce failed|Custom allreduce is disabled"),
    text("nfs-recovered", "benign", "benign", "none", "nfs: server",
         pattern=r"nfs: server \S+ OK"),
    # What is left on NFS of a file that was removed while open: its removal fails, nothing else.
    text("nfs-removed", "benign", "benign", "none", "resource busy",
         pattern=r"resource busy: '\S*\.nfs[0-9a-f]+"),
    text("nccl-fallback", "benign", "benign", "none", "open libibverbs", "a path for pattern",
         "Cannot get incoming CPU", "Maximum retry reached for"),
    text("rdma-managed", "benign", "benign", "none", "async event",
         pattern=r"async event\S* : (client reregistration|(GID|P_Key|pkey) table change"
                 r"|(SM|LID) change|port active|port is active|GID change)"),
    text("mlx4-command", "benign", "benign", "none", "mlx4_core",
         pattern=r"mlx4_core \S+ command 0x\w+ failed: fw status"),
    text("framework-noise", "benign", "benign", "none", "Unable to register cu",
         "placer already registered", "read from SysFS had negative value",
         "Failed to load image Python extension", "couldn't load driver 'lib",
         "XDG_RUNTIME_DIR not set", "loss scaler reducing", "perf: interrupt took too long",
         "Could not load dynamic library", "ACPI Error", "ACPI BIOS Error",
         "lowering kernel.perf_event", "[[SysMon]]",
         "caller indicates that this is not a failure", "error-free", "find NCCL_TOPO_FILE",
         "Only EFA provider is supported"),
)  # fmt: skip
