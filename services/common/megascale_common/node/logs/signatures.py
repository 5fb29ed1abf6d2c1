"""All signatures, in the order in which they are tried, and what an unknown fatal line is.

Texts of torch, NCCL (5067397), CUDA (driver_types.h 12.9), UCX, gloo, Slurm and Linux.
Numbered errors are in ``catalogue``.
"""

from __future__ import annotations

import re

from megascale_common.node.logs.categories import Kind
from megascale_common.node.logs.rules.communication import COMMUNICATION
from megascale_common.node.logs.rules.ends import ENDS
from megascale_common.node.logs.rules.files import FILES_AND_NUMBERS
from megascale_common.node.logs.rules.gpu import GPU
from megascale_common.node.logs.rules.harmless import HARMLESS
from megascale_common.node.logs.rules.host import HOST
from megascale_common.node.logs.rules.network import NETWORK
from megascale_common.node.logs.rules.standing import STANDING
from megascale_common.node.logs.rules.wide import WIDE
from megascale_common.node.logs.signature import Signature

SIGNATURES: tuple[Signature, ...] = (
    *HARMLESS, *GPU, *HOST, *NETWORK, *COMMUNICATION, *FILES_AND_NUMBERS, *ENDS, *WIDE,
    *STANDING,
)  # fmt: skip

# A line that ends something and that no signature knows; the weak form only wraps another line.
WRAPPER = Kind("unknown-wrapper", "unknown", "root", "alert", weak=True)
FATAL = Kind("unknown-fatal", "unknown", "root", "alert")
# In lower case, as literals are.
FATAL_LITERALS = ("error", "exception", "fatal", "nccl warn", "terminate called",
                  "segmentation fault", "core dumped", "corruption", "check failed", "exitcode",
                  "root cause", "assert failed", " warn ", "ncclcomminit",
                  "interface found", "panicked", "non-zero status",
                  "nccl failure", "mpi_err", "internal: ", "return code",
                  "sigsegv", "sigbus", "sigabrt", "free(): ", "malloc(): ", "double free",
                  "exited on signal", "munmap_chunk", "process received signal",
                  "smashing")  # fmt: skip
IGNORED = re.compile(
    r"NCCL INFO|^frame #\d|During handling of the above|another exception occurred"
    r"|\[Hardware Error\]|\b(?:0|no) errors?\b|stack trace: \*\*\*|^\s+File \""
    r"|(?i:\berrors?\"?[=:] ?(?:0\b|\"\"|null\b|none\b|<?nil\b))"
    r"|(?<!\w)(?<!DEBUG=)\[?(?:INFO|DEBUG)\b|\b\w+Warning:|^Exception ignored in"
    r"|\(non-fatal\)|\b[Ee]rror[ _]rate\b"
)
WRAPPERS = re.compile(
    r"terminate called|exitcode|ChildFailedError|DistBackendError|ncclInvalidUsage|Last error"
    r"|watchdog thread terminated|raised from|Root Cause|^Traceback|ncclSystemError"
    r"|unhandled system error|ncclInternalError|tasks? .*[Ee]xited|errors\.error_handler"
    r"|error_handler: \{|Connect to \S+ failed|RpcError|MPI_ERRORS_ARE_FATAL|\bAborted\b"
    r"|\bSIGABRT\b"
)
FATAL_PATTERN = re.compile(
    r"\b\w*(?:Error|Exception)\b|\b(?:ERROR|FATAL|[Ff]atal|[Ee]rror:)|NCCL WARN|terminate called"
    r"|[Ss]egmentation fault|core dumped|corruption|[Cc]heck failed|exitcode|Root Cause"
    r"|INTERNAL ASSERT FAILED|\.(?:h|cc|cu):\d+ WARN |unexpected system error"
    r"|ncclCommInit\w*\(.*\) failed|no socket interface found|panicked at|non-zero status"
    r"|NCCL failure|MPI_ERR\w*|error occurred|\bINTERNAL: .*failed"
    r"|Assertion\b.* failed|exits? with return code = ?-|\bSIG(?:SEGV|BUS|ABRT)\b"
    r"|\b(?:free|malloc|realloc|munmap_chunk)\(\): |double free or|Process received signal"
    r"|exited on signal \d"
    r"|stack smashing|NCCL error|CUDA error\b"
)
