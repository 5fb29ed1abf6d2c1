"""S3Storage: a prefix of a bucket of S3, or of a server that has its conditional writes.

Nothing is overwritten: every object is written with ``If-None-Match: *``, which the server decides
atomically, also at the end of a multipart upload. Some servers, such as Ceph's, have the condition
for single objects alone: there an upload first takes its name with an empty object. Each write
carries an id of its own in the object's metadata, so that a write whose reply was lost is known
from one that lost the race.

Settings, as boto3 reads them: credentials from the environment, ``~/.aws/credentials`` or the
machine's role, the region (``AWS_DEFAULT_REGION``) and the endpoint (``AWS_ENDPOINT_URL``). Ours:
``MEGASCALE_S3_SSE`` (``AES256`` or ``aws:kms``) and ``MEGASCALE_S3_SSE_KMS_KEY_ID`` have the server
encrypt what is written. The client sends a CRC32 of every object and part, which the server checks.
"""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.client import Config
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

from megascale_checkpoint.storage.protocol import check_path, reads_as
from megascale_common.service.errors import RequestError, invalid

# What S3 and boto3 raise, as the errors that :class:`Storage` promises.

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


# Of a multipart upload, the first ones; they double after each PARTS_OF_A_SIZE, because S3 takes no
# more than MAX_PARTS, of 5 GiB at most. Files reach its limit of 5 TiB, and small ones cost little.
PART_BYTES = 32 * 2**20
MAX_PARTS, PARTS_OF_A_SIZE = 10_000, 1_250
PARALLEL_PARTS = 4  # of one file; with the one that is filled, 160 MiB of memory
PARALLEL_BYTES = PARALLEL_PARTS * PART_BYTES  # larger parts are fewer at once
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 3, 20
TRIES = 3  # of one request, for a connection that fails and for an answer of 5xx
CONFLICT_TRIES = 3
UNFINISHED = "."  # names() leaves out what starts with it: objects of check()
_WRITER = "megascale-writer"  # key of the metadata
# By settings and bucket: whether completing a multipart upload heeds If-None-Match.
_CONDITIONAL_COMPLETION: dict[tuple[tuple[tuple[str, str], ...], str], bool] = {}


class S3Storage:
    """A prefix of a bucket. See :class:`Storage` for its verbs.

    Args:
        uri: s3://bucket/prefix.

    Raises:
        RequestError: the URI names no bucket, or a setting cannot be used.
    """

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        if not parts.netloc or parts.query or parts.fragment:
            raise RequestError(f"checkpoint uri {uri!r} names no bucket: give s3://bucket/prefix")
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._uri = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self._encryption = _encryption()

    @property
    def uri(self) -> str:
        """s3://bucket/prefix."""
        return self._uri

    def check(self) -> None:
        """See :meth:`Storage.check`; also finds out whether conditional writes are conditional."""
        path = f"{UNFINISHED}check-{uuid.uuid4().hex}"
        if not self.create(path, b"check"):
            raise OSError(errno.EEXIST, "a name that no other writer chooses is taken", self._uri)
        try:
            if self.create(path, b"other"):
                raise invalid(
                    "checkpoint.uri",
                    f"the server of {self._uri} ignores If-None-Match, which commits need",
                    "use one that has S3's conditional writes",
                )
        finally:
            self.delete(path)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> int:
        """See :meth:`Storage.write`. A file above PART_BYTES is uploaded in parts."""
        key, parts = self._key(path), _parts(chunks)
        first = next(parts, bytearray())
        if len(first) < PART_BYTES:
            if not self._put(key, bytes(first)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._name(key))
            return len(first)
        return self._upload(key, first, parts)

    def create(self, path: str, data: bytes) -> bool:
        return self._put(self._key(path), data)

    def confirm(self, path: str, data: bytes) -> bool:
        """See :meth:`Storage.confirm`: what can be read is durable."""
        return reads_as(self, path, data)

    def read(self, path: str) -> bytes:
        key = self._key(path)
        with mapped(self._name(key)):
            return bytes(self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read())

    def read_into(self, path: str, offset: int, target: memoryview) -> int:
        key, done = self._key(path), 0
        if not target:
            return 0
        with mapped(self._name(key)):
            wanted = f"bytes={offset}-{offset + len(target) - 1}"
            try:
                got = self._client.get_object(Bucket=self._bucket, Key=key, Range=wanted)
            except ClientError as error:
                if error.response["Error"].get("Code") == "InvalidRange":
                    return 0  # the offset is at the end or beyond
                raise
            with got["Body"] as body:
                while done < len(target) and (count := body.readinto(target[done:])):
                    done += count
        return done

    def size(self, path: str) -> int | None:
        key = self._key(path)
        head = self._head(key)
        return None if head is None else int(head["ContentLength"])

    def names(self, folder: str, after: str = "") -> list[str]:
        prefix = f"{self._key(folder)}/" if folder else (self._prefix and f"{self._prefix}/")
        found = set()
        with mapped(self._name(prefix)):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=prefix, Delimiter="/", StartAfter=f"{prefix}{after}"
            )
            for page in pages:
                found |= {each["Key"] for each in page.get("Contents", ())}
                found |= {each["Prefix"] for each in page.get("CommonPrefixes", ())}
        names = {key[len(prefix) :].rstrip("/") for key in found}
        return sorted(n for n in names if n > after and not n.startswith(UNFINISHED))

    def delete(self, path: str) -> bool:
        """See :meth:`Storage.delete`. Folders are the keys' common beginnings: none is empty."""
        key = self._key(path)
        if self._head(key) is None:
            if self.names(path):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), self._name(key))
            return False
        with mapped(self._name(key)):
            self._client.delete_object(Bucket=self._bucket, Key=key)
        return True

    def remove_unfinished(self, folder: str) -> int:
        """See :meth:`Storage.remove_unfinished`: aborts uploads, so that their writers fail."""
        prefix, count = f"{self._key(folder)}/", 0
        with mapped(self._name(prefix)):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=prefix
            )
            found = [each for page in pages for each in page.get("Uploads", ())]
            for each in found:
                name = each["Key"].removeprefix(prefix)
                if each["Key"].startswith(prefix) and "/" not in name:
                    self._abort(each["Key"], each["UploadId"])
                    count += 1
        return count

    @property
    def _client(self) -> Any:
        return _client(_environment())

    def _key(self, path: str) -> str:
        check_path(path, self._uri)
        return f"{self._prefix}/{path}" if self._prefix else path

    def _name(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def _head(self, key: str) -> dict[str, Any] | None:
        with mapped(self._name(key)):
            try:
                found: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=key)
            except ClientError as error:
                if is_absent(error):
                    return None
                raise
            return found

    def _put(self, key: str, data: bytes, writer: str = "") -> bool:
        """Write one object if its name is free; False when another writer has taken it."""
        writer = writer or uuid.uuid4().hex
        with mapped(self._name(key)):
            for tries_left in reversed(range(CONFLICT_TRIES)):
                try:
                    self._client.put_object(
                        Bucket=self._bucket,
                        Key=key,
                        Body=data,
                        IfNoneMatch="*",
                        Metadata={_WRITER: writer},
                        **self._encryption,
                    )
                    return True
                except ClientError as error:
                    if is_conflict(error) and tries_left:
                        continue  # another write of the name was in progress: see who won
                    if is_taken(error):
                        return self._wrote(key, writer)
                    raise
        raise AssertionError("the last try returns or raises")

    def _wrote(self, key: str, writer: str) -> bool:
        """Whether the object is this writer's: its reply was lost, and the request repeated."""
        head = self._head(key)
        return head is not None and head.get("Metadata", {}).get(_WRITER) == writer

    def _upload(self, key: str, first: bytearray, rest: Iterator[bytearray]) -> int:
        writer = uuid.uuid4().hex
        claim = "" if self._completes_conditionally() else f"{writer}-claim"
        with mapped(self._name(key)):
            upload = self._begin(key, writer)
            try:
                parts, size = self._send_parts(key, upload, first, rest)
                if claim and not self._put(key, b"", claim):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._name(key))
                try:
                    self._complete(key, upload, parts)
                except ClientError as error:
                    if not self._wrote(key, writer):
                        if is_taken(error):
                            raise FileExistsError(
                                errno.EEXIST, os.strerror(errno.EEXIST), self._name(key)
                            ) from error
                        raise
            except BaseException:
                self._abort(key, upload, quietly=True)
                self._give_back(key, claim)
                raise
        return size

    def _give_back(self, key: str, claim: str) -> None:
        """Free a name that a failed upload has taken; nobody else can have written it since."""
        with suppress(Exception):  # as with the upload: the first error is the one to report
            if claim and self._wrote(key, claim):
                self._client.delete_object(Bucket=self._bucket, Key=key)

    def _begin(self, key: str, writer: str) -> str:
        answer = self._client.create_multipart_upload(
            Bucket=self._bucket,
            Key=key,
            ChecksumAlgorithm="CRC32",
            Metadata={_WRITER: writer},
            **self._encryption,
        )
        return str(answer["UploadId"])

    def _send_parts(
        self, key: str, upload: str, first: bytearray, rest: Iterator[bytearray]
    ) -> tuple[list[dict[str, Any]], int]:
        """Upload the parts, several at once; returns what completion names, and their bytes."""
        sent: list[dict[str, Any]] = []
        running: deque[Future[dict[str, Any]]] = deque()
        size = 0
        with ThreadPoolExecutor(PARALLEL_PARTS, "s3-part") as pool:
            try:
                for number, part in enumerate(_chain(first, rest), start=1):
                    if number > MAX_PARTS:
                        text = f"a file is larger than {MAX_PARTS} parts"
                        raise OSError(errno.EFBIG, f"{text}: use more ranks", self._name(key))
                    size += len(part)
                    running.append(pool.submit(self._send, key, upload, number, part))
                    if len(running) >= parallel_parts(len(part)):
                        sent.append(running.popleft().result())
                sent += [each.result() for each in running]
            except BaseException:
                for each in running:
                    each.cancel()
                raise
        return sent, size

    def _send(self, key: str, upload: str, number: int, data: bytearray) -> dict[str, Any]:
        answer = self._client.upload_part(
            Bucket=self._bucket,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=bytes(data),
            ChecksumAlgorithm="CRC32",
        )
        part = {"PartNumber": number, "ETag": answer["ETag"]}
        checksum = answer.get("ChecksumCRC32")
        return {**part, "ChecksumCRC32": checksum} if checksum else part

    def _complete(self, key: str, upload: str, parts: list[dict[str, Any]]) -> None:
        self._client.complete_multipart_upload(
            Bucket=self._bucket,
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": parts},
            IfNoneMatch="*",
        )

    def _completes_conditionally(self) -> bool:
        """Whether the server refuses to complete an upload over an object; found out once."""
        place = (_environment(), self._bucket)
        if place not in _CONDITIONAL_COMPLETION:
            path = f"{UNFINISHED}check-{uuid.uuid4().hex}"
            self.create(path, b"check")
            try:
                _CONDITIONAL_COMPLETION[place] = not self._completes_over(path)
            finally:
                self.delete(path)
        return _CONDITIONAL_COMPLETION[place]

    def _completes_over(self, path: str) -> bool:
        """Whether the server completes a multipart upload over an object that stands there."""
        key = self._key(path)
        with mapped(self._name(key)):
            upload = self._begin(key, "check")
            try:
                self._complete(key, upload, [self._send(key, upload, 1, bytearray(b"other"))])
            except ClientError as error:
                if is_taken(error) or is_conflict(error):
                    self._abort(key, upload, quietly=True)
                    return False
                raise
        return True

    def _abort(self, key: str, upload: str, *, quietly: bool = False) -> None:
        try:
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload)
        except Exception as error:
            # Completed or aborted in the meantime; an unfinished upload that stays is no object,
            # and the next attempt removes it.
            if not quietly and not is_absent(error):
                raise


def part_bytes(number: int) -> int:
    """Size of part ``number``, from 1 on, of an upload whose length is not known beforehand."""
    return int(PART_BYTES << (number - 1) // PARTS_OF_A_SIZE)


def parallel_parts(size_bytes: int) -> int:
    """How many parts of a size are sent at once."""
    return max(1, min(PARALLEL_PARTS, PARALLEL_BYTES // max(1, size_bytes)))


def _parts(chunks: Iterable[bytes | memoryview]) -> Iterator[bytearray]:
    """The bytes of ``chunks`` in parts of :func:`part_bytes`; the last may be shorter."""
    part, number = bytearray(), 1
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            taken = rest[: part_bytes(number) - len(part)]
            part += taken
            rest = rest[len(taken) :]
            if len(part) == part_bytes(number):
                yield part
                part, number = bytearray(), number + 1
    if part:
        yield part


def _chain(first: bytearray, rest: Iterator[bytearray]) -> Iterator[bytearray]:
    yield first
    yield from rest


def _encryption() -> dict[str, str]:
    """The arguments that have the server encrypt an object."""
    kind = os.environ.get("MEGASCALE_S3_SSE", "")
    key = os.environ.get("MEGASCALE_S3_SSE_KMS_KEY_ID", "")
    if kind not in ("", "AES256", "aws:kms"):
        raise invalid(
            "MEGASCALE_S3_SSE", f"{kind!r} is no server-side encryption", "give AES256 or aws:kms"
        )
    if key and kind != "aws:kms":
        raise invalid(
            "MEGASCALE_S3_SSE_KMS_KEY_ID",
            "a key without MEGASCALE_S3_SSE=aws:kms encrypts nothing",
            "set MEGASCALE_S3_SSE=aws:kms, or leave the key out",
        )
    found = {"ServerSideEncryption": kind} if kind else {}
    return {**found, "SSEKMSKeyId": key} if key else found


def _environment() -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_")))


_making = threading.Lock()


def _client(environment: tuple[tuple[str, str], ...]) -> Any:
    """A client for the settings of now; it may be used by all threads."""
    with _making:  # boto3's sessions may not be
        return _make_client(environment)


@lru_cache(maxsize=4)
def _make_client(environment: tuple[tuple[str, str], ...]) -> Any:
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": TRIES, "mode": "standard"},
        max_pool_connections=64,
        user_agent_extra="megascale",
    )
    with mapped("s3://"):
        try:
            return boto3.session.Session().client("s3", config=config)
        except ValueError as error:
            raise invalid("AWS_ENDPOINT_URL", str(error), "give http(s)://host:port") from error
