"""What S3 and boto3 raise, as the errors that :class:`Storage` promises."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ReadTimeoutError,
)
from botocore.exceptions import ConnectionError as NotConnectedError

from megascale_common.service.errors import invalid

_FORBIDDEN = {
    "403",
    "AccessDenied",
    "AllAccessDisabled",
    "AccountProblem",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
    "KMS.AccessDeniedException",
}
_OTHER_REGION = {
    "301",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
}
_FULL = {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"}
_RIGHTS = (
    "give the node's credentials s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket, "
    "s3:AbortMultipartUpload and s3:ListBucketMultipartUploads on the bucket"
)
_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write ~/.aws/credentials, on every node"
)


@contextmanager
def mapped(name: str) -> Iterator[None]:
    """Raise OSError, or RequestError for a bucket that is not there, with ``name`` and a remedy."""
    try:
        yield
    except ClientError as error:
        raise _of_answer(error, name) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        text = f"{error}: {_CREDENTIALS}"
        raise PermissionError(errno.EACCES, text, name) from error
    except ParamValidationError as error:
        raise invalid("checkpoint.uri", f"{name}: {error}", "correct the bucket's name") from error
    except (ConnectTimeoutError, ReadTimeoutError) as error:
        raise OSError(errno.ETIMEDOUT, f"no answer in time: {error}", name) from error
    except NotConnectedError as error:
        text = f"cannot be reached: {error}: check AWS_ENDPOINT_URL and the network"
        raise OSError(errno.EHOSTDOWN, text, name) from error
    except BotoCoreError as error:
        raise OSError(errno.EIO, str(error), name) from error


def is_absent(error: Exception) -> bool:
    """Whether the server answered that there is no such object or upload."""
    return _code(error) in ("404", "NoSuchKey", "NoSuchUpload")


def is_taken(error: Exception) -> bool:
    """Whether a conditional write was refused, because the name is taken."""
    return _code(error) in ("412", "PreconditionFailed")


def is_conflict(error: Exception) -> bool:
    """Whether a conditional write met another one of the same name in progress."""
    return _code(error) in ("409", "ConditionalRequestConflict")


def _code(error: Exception) -> str:
    return str(error.response["Error"].get("Code")) if isinstance(error, ClientError) else ""


def _of_answer(error: ClientError, name: str) -> Exception:
    code = _code(error)
    text = f"{code}: {error.response['Error'].get('Message', '')}"
    if is_absent(error):
        return FileNotFoundError(errno.ENOENT, text, name)
    if code in ("NoSuchBucket", "InvalidBucketName"):
        bucket = name.removeprefix("s3://").split("/", 1)[0]
        problem = f"there is no bucket {bucket} ({code})"
        return invalid("checkpoint.uri", problem, "create it, or correct the name")
    if code in _OTHER_REGION:
        problem = f"the bucket is in another region ({text})"
        return invalid("checkpoint.uri", problem, "set AWS_DEFAULT_REGION to it on every node")
    if code in _FORBIDDEN:
        return PermissionError(errno.EACCES, f"{text}: {_RIGHTS}", name)
    if code in _FULL:
        return OSError(errno.ENOSPC, text, name)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status == 429 or code in ("SlowDown", "RequestTimeout"):
        return OSError(errno.ETIMEDOUT, text, name)
    return OSError(errno.EIO, text, name)
