"""How processes end: by a scheduler, a signal, a peer that has gone."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

ENDS = (
    text("slurm-preempted", "scheduler_preempted", "root", "restart", "CANCELLED AT",
         "job is preempted", "Node failure on", pattern=r"DUE TO (PREEMPTION|JOB REQUEUE"
                 r"|NODE FAILURE)|preempted|Node failure on"),
    text("slurm-ended", "scheduler_ended", "root", "none", "CANCELLED AT", "cancelled by user",
         "scancel", unless="DUE TO TASK FAILURE"),
    text("sigkill", "sigkill_unknown", "secondary", "restart", "xitcode", "SIGKILL",
         "signal: Killed", "Killed", "exit code 137", "ignal 9",
         "return code = -9", "xit code: 137", "xited with code 137", "xit status 137",
         "xitCode", "was sent SIGKILL", "(SIGKILL)",
         pattern=r"\btasks? \S+: Killed|(?i:exit(ed with)? ?(code|status):? ?137\b)"
                 r"|was sent SIGKILL|\(SIGKILL\)|exitcode\s*: -9\b|[Ss]ignal 9\b"
                 r"|Signals\.SIGKILL|signal: Killed|^\W*Killed(: 9)?\W*$"
                 r"|line \d+:\s+\d+ Killed|^\[\d+\]\W+\d+ killed\b|exit code 137"
                 r"|return code = -9\b"),
    text("peer-closed", "peer_closed_secondary", "secondary", "none", "Connection closed by",
         "onnection reset by peer", "Broken pipe", "Socket recv failed", "ncclRemoteError",
         "remote process exited", "sendBytes failed", "recvValue failed", "[Proxy Service",
         "[Service thread] E", "[Service thread] C", "Connection refused",
         "Proxy Call to rank", "monitoredBarrier", "got 0 bytes", "Socket closed",
         "lost communication with", "HorovodInternalError", "onnection was closed by",
         "Software caused connection abort", "closed the connection", "Horovod has been shut down",
         "ranks finished execution", "Lost connection to", "scheduler broken",
         "to scheduler failed", "CommClosedError",
         pattern=r"Lost connection to|to scheduler (broken|failed)|CommClosedError"
                 r"|UNAVAILABLE.*Socket closed|lost communication with a remote"
                 r"|HorovodInternalError"
                 r"|Horovod has been shut down|ranks finished execution"
                 r"|Software caused connection abort|peer closed the connection"
                 r"|Connection closed by (remote )?peer|reset by peer|Broken pipe|recv failed"
                 r"|ncclRemoteError|remote process exited|sendBytes|recvValue"
                 r"|WARN \[(Proxy Service|Service thread)|\bWARN .*Connection refused"
                 r"|Proxy Call to rank \d+ failed|reached monitoredBarrier, but received errors"
                 r"|[Ff]ailed to recv, got 0 bytes"),
    text("teardown", "teardown_secondary", "teardown", "none", "death signal", "closing signal",
         "via signal SIG", "nable to shutdown processes", "Sending processes ",
         "[Service thread] Connection closed", "Abort COMPLETE", "entire process down",
         "NCCL operations have failed", "SignalException", "KeyboardInterrupt",
         "Worker group FAILED", "Waiting up to", "Force Terminated",
         "Terminating job step", "Terminating StepId", ": Terminated", "Killing remaining",
         "destructor entered", "] Killing subprocess", "exitcode: -15", "exitcode  : -15",
         "15 (SIGTERM)", "communicator was aborted", "forcing job termination",
         "MPI_ABORT was invoked", "MPI_Abort(", "DUE TO TASK FAILURE"),
)  # fmt: skip
