"""Storage, and numbers that are none."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

FILES_AND_NUMBERS = (
    text("storage-quota", "storage_quota", "root", "stop", "quota exceeded", "EDQUOT", "Errno 122",
         "QuotaExceeded", pattern=r"[Qq]uota ?[Ee]xceeded|EDQUOT|Errno 122"),
    text("storage-stale", "storage_stale_handle", "root", "restart", "tale file handle",
         "tale NFS file handle", "Errno 116"),
    text("storage-gone", "storage_unreachable", "root", "alert", "nfs: server",
         "endpoint is not connected", "endpoint shutdown", "LustreError", "Lustre:",
         "libceph", "ceph:", "was evicted by", "beegfs", "mount.nfs",
         unless="UCX|ucp_",
         pattern=r"libceph: ((osd|mds)\d+.*(down|timed out|socket closed|socket error)|mon\d+.*"
                 r"session lost)|ceph: .*(hung|caps stale|timed out)|client was evicted by"
                 r"|beegfs.*([Cc]ommunication error|not reachable)|mount\.nfs.*timed out"
                 r"|not responding|not connected|endpoint shutdown"
                 r"|Lustre.*(was lost|timed out|operation .* failed)"),
    text("storage-full", "storage_write_failed", "root", "stop", "No space left on device",
         "ENOSPC", "StorageFull", unless="cgroup|inotify|sem(get|op)|shmget", weak=True),
    text("storage-object", "storage_write_failed", "root", "restart", "when calling the",
         "S3UploadFailedError", "minReplication", "could only be replicated to",
         "botocore.exceptions", "google.api_core.exceptions", "google.cloud.storage",
         "azure.core.exceptions", "azure.storage.StorageException", "gcsfs.retry",
         "AzureHttpError", "HdfsError",
         pattern=r"when calling the (PutObject|UploadPart\w*|CreateMultipartUpload"
                 r"|CompleteMultipartUpload|CopyObject) operation|S3UploadFailedError"
                 r"|to 0 (of the \d+ minReplication )?nodes"
                 r"|botocore\.exceptions\.(\w*Timeout\w*|EndpointConnection\w*|ConnectionClosed\w*"
                 r"|ResponseStreaming\w*|HTTPClientError|SSLError|IncompleteReadError)"
                 r"|google\.api_core\.exceptions\.(ServiceUnavailable|TooManyRequests"
                 r"|GatewayTimeout"
                 r"|InternalServerError|RetryError)|azure\.core\.exceptions\.(Service\w+|Http\w+)"
                 r"|azure\.storage\.StorageException: .*(Connection reset|timed? ?out|unavailable)"
                 r"|gcsfs\.retry\.HttpError|AzureHttpError|hdfs\.util\.HdfsError"),
    text("storage-write", "storage_write_failed", "root", "restart", "StreamWriter failed",
         "unexpected pos", "nput/output error", "cannot be opened", "ead-only file system",
         "Remote I/O error", "iostream error", "SafetensorError", "IoError",
         pattern=r"iostream error|(SafetensorError|IoError).*(code: 5\b|I/O error|Input/output)"
                 r"|StreamWriter failed writing|unexpected pos \d+|\[Errno 5\]"
                 r"|\bError\b.*Input/output error|write\(\).*Input/output error"
                 r"|^RuntimeError: File \S+ cannot be opened"
                 r"|\bOSError.*[Rr]ead-only file system|Remote I/O error"),
    text("nan", "numeric_nan", "root", "stop", "NaN", "nan", "NAN", "Invalid loss",
         "not finite", "on-finite", "Minimum loss scale reached", "loss scale already at minimum",
         "NanLossDuring", "`nan`", "NaN or Inf found", "NaN detected", "nan detected", "Nan/Inf",
         pattern=r"NaN or Inf found|^\s*(step )?\d+[ \t:,]+nan\s*$|Minimum loss scale reached"
                 r"|loss scale already at minimum|NanLossDuring"
                 r"|contains either `inf`, `nan`|(?i:(?<!no )\bnans? (loss|gradients?"
                 r"|values?)? ?(was |were )?"
                 r"(detected|encountered|found) (in|at|for|during))|(?i:(detected|found) nans? )"
                 r"|gradients are Nan/Inf|total norm .*is non-finite|diverged with loss = NaN"
                 r"|found NaN|(became|is) (infinite or )?NaN|NaN or Inf (found )?in (loss|grad)"
                 r"|(?i:(grad[_ ]norm|(?:\b|_)loss)['\"]?[:= ]{1,3}nan\b)|Unexpected result nan"
                 r"|(?i:loss (is|=) ?(nan|inf)\b)|Invalid loss, terminating"
                 r"|returned nan values in|(?i:loss is (not finite|non-finite))"),
)  # fmt: skip
