"""Faults between ranks: collectives, shared memory, rendezvous."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

COMMUNICATION = (
    text("duplicate-gpu", "config_duplicate_gpu", "root", "stop", "Duplicate GPU detected"),
    text("nccl-version", "config_version_drift", "root", "stop", "Mismatched NCCL version"),
    text("collective-mismatch", "collective_mismatch", "root", "stop",
         "mismatch between collectives", "Mismatched collective", "ollective operation counts",
         "inconsistent", "appears not to match", "Mismatched allreduce", "Mismatched allgather",
         "Mismatched broadcast", "Mismatched data types", "essage truncated", "preamble.length",
         "mismatch in rank count",
         pattern=r"mismatch between collectives|[Mm]ismatched (collective|allreduce|allgather"
                 r"|broadcast|data types)|ollective operation counts|has inconsistent \d+ params"
                 r"|appears not to match (sizes|strides) of the same param|[Mm]essage truncated"
                 r"|op\.preamble\.length <= op\.nbytes|mismatch in rank count"),
    text("shm-full", "shm_exhausted", "root", "stop", "No space left on device",
         pattern=r"(/dev/shm|</torch_|/psm_|'/torch_).*No space left"
                 r"|No space left on device.*(/dev/shm|</torch_|/psm_|'/torch_)"
                 r"|torch_shm_manager.*No space left"),
    text("shm-gone", "shm_attach_failed", "root", "restart", "open shared memory object",
         "'/psm_", pattern=r"open shared memory object .*No such file|No such file.*'/psm_"),
    text("files-open", "file_limit", "root", "stop", "oo many open files", "oo many files open",
         "file-max limit",
         "items of ancdata"),
    text("shm-exhausted", "shm_exhausted", "root", "stop", "creating shared memory segment",
         "failed to extend /dev/shm", "insufficient shared memory", "out of shared memory",
         "signal: Bus error", "posix_fallocate failed", "unable to mmap", "unable to allocate sha",
         pattern=r"NCCL WARN|shared memory|Bus error|/dev/shm|</torch_"),
    text("shm-attach", "shm_attach_failed", "root", "restart", "attaching to shared memory"),
    text("timeout-collective", "collective_timeout", "secondary", "restart",
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
    text("timeout-aborted", "collective_timeout", "secondary", "restart",
         "communicator was aborted",
         pattern=r"communicator was aborted.*([Tt]imed out|Timeout at NCCL)"),
    text("watchdog-stuck", "watchdog_stuck", "secondary", "restart", "watchdog got stuck",
         "Heartbeat monitor timed out", "no heartbeat of its watchdog",
         "preparing to dump debug info", "Could not acquire GIL", "watchdog hang",
         "watchdog thread heartbeat", "dump signal", "watchdog thread may be stuck"),
    text("rendezvous-closed", "rendezvous_closed", "secondary", "restart",
         "RendezvousClosedError", "RendezvousGracefulExitError", "endezvous is closed"),
    text("rendezvous-timeout", "rendezvous_timeout", "root", "restart", "RendezvousTimeoutError",
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
    text("port-in-use", "port_in_use", "root", "restart", "ddress already in use", "EADDRINUSE",
         unless=r"\bmount\."),
)  # fmt: skip
