"""A real S3 server for tests: moto's, in a process of its own, with its requests over HTTP.

It keeps objects in memory and has conditional writes, multipart uploads and, on request, the check
of rights. It answers one request at a time: among threads its conditional writes are not atomic,
as S3's are.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.node.process import armed_command, child_environment

_SERVE = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
moto = DomainDispatcherApplication(create_backend_app)
def app(environ, start):
    if environ["REQUEST_METHOD"] in sys.argv[1:]:
        environ.pop("HTTP_IF_NONE_MATCH", None)
    return moto(environ, start)
server = make_server("127.0.0.1", 0, app, threaded=False)
print(server.server_port, flush=True)
server.serve_forever()
"""
BUCKET = "checkpoints"


class S3Server:
    """A server with one empty bucket.

    Args:
        checks_rights: after the first request, refuse what no policy allows.
        unconditional: ignore conditions of these methods: PUT and POST as older servers do, POST
            (the end of a multipart upload) as Ceph does.
    """

    def __init__(
        self, folder: Path, *, checks_rights: bool = False, unconditional: tuple[str, ...] = ()
    ) -> None:
        self._log = folder / "s3.log"
        rights = {"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if checks_rights else {}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                armed_command([sys.executable, "-c", _SERVE, *unconditional]),
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(rights),
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        self.endpoint = f"http://127.0.0.1:{int(line)}"
        self.client().create_bucket(Bucket=BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """The settings of a process that uses the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "of-the-tests",
            "AWS_SECRET_ACCESS_KEY": "of-the-tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A client of boto3 for the server."""
        import boto3

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id="of-the-tests",
            aws_secret_access_key="of-the-tests",
            region_name="us-east-1",
        )

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait(CALL_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
