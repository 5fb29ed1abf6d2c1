"""The PEM files of one process, for both sides of its connections, read again when they change.

With a certificate authority the connections of a cluster are mutual TLS: each side presents a
certificate of the authority and checks the other's. A certificate that is replaced on disk is used
from the next connection on. Open connections continue, so a renewal does not disturb a job.

grpc is imported late, because an agent first sets environment variables that gRPC reads at import.
"""

from __future__ import annotations

import argparse
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megascale_common.service import logs
from megascale_common.service.errors import OptionError
from megascale_common.service.identity.peers import Role

if TYPE_CHECKING:
    import grpc

_log = logs.get(__name__)
_Stamp = tuple[tuple[int, int], ...]  # time of the last write and size of each file


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: a key, its certificate (with the chain), and the authority of the others.

    Without ``ca`` a server proves its identity, and its clients need only the cluster token.
    """

    key: Path
    certificate: Path
    ca: Path | None = None

    @property
    def mutual(self) -> bool:
        """Whether the other side must present a certificate."""
        return self.ca is not None

    def check(self) -> None:
        """Raise an OptionError if the files cannot be used together."""
        self.context(ssl.PROTOCOL_TLS_SERVER)

    def context(self, protocol: int) -> ssl.SSLContext:
        """An SSL context of Python from the present files; raises as :meth:`check`."""
        files = [path for path in (self.key, self.certificate, self.ca) if path is not None]
        try:
            context = ssl.SSLContext(protocol)
            context.load_cert_chain(self.certificate, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise OptionError(
                f"--tls-key {self.key}, --tls-certificate {self.certificate}: "
                f"{error.reason or 'not PEM'}: give a key and its certificate as PEM files"
            ) from None
        except OSError as error:
            names = ", ".join(map(str, files))
            raise OptionError(
                f"--tls-key, --tls-certificate: one of {names} cannot be read "
                f"({error.strerror}): give PEM files that this user can read"
            ) from None
        return context

    def options(self) -> list[str]:
        """Command-line options by which another process of the node uses the same files."""
        found = ["--tls-key", str(self.key), "--tls-certificate", str(self.certificate)]
        return [*found, "--tls-ca", str(self.ca)] if self.ca is not None else found

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a server; raises OptionError for files that cannot be used."""
        import grpc

        self.check()
        files = _Fresh(self)
        # The fetcher returns None for "unchanged" (grpc's reference), which its types leave out.
        return grpc.dynamic_ssl_server_credentials(
            files.configuration(),
            files.changed,  # type: ignore[arg-type]
            require_client_authentication=self.mutual,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a channel, from the present files.

        Raises:
            OptionError: the files cannot be used.
        """
        if self.ca is None:
            raise OptionError("--tls-ca: give the authority whose servers are trusted")
        import grpc

        self.check()
        return grpc.ssl_channel_credentials(
            self.ca.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )


class _Fresh:
    """The files of a server; a handshake after a change uses the new ones."""

    def __init__(self, files: Certificates) -> None:
        self._files = files
        self._stamp = self._look()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        import grpc

        files = self._files
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        roots = files.ca.read_bytes() if files.ca is not None else None
        return grpc.ssl_server_certificate_configuration([pair], roots)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new files, or None if they are unchanged; gRPC calls it in a thread per handshake."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            self._files.check()  # fails if so far only the key was replaced
            found = self.configuration()
        except (OSError, OptionError) as error:
            _log.warning("new certificates cannot be used; keeping the old ones", error=str(error))
            return None
        self._stamp = stamp
        _log.info("certificates were read again", certificate=str(self._files.certificate))
        return found

    def _look(self) -> _Stamp:
        paths = (self._files.key, self._files.certificate, self._files.ca)
        found = [path.stat() for path in paths if path is not None]
        return tuple((status.st_mtime_ns, status.st_size) for status in found)


FOLDER = "tls"  # in a run folder: the cluster's authority and certificates
CA_FILE = "ca.pem"


def in_folder(folder: Path, role: Role, name: str) -> Certificates:
    """The files of one identity in a folder made by ``megascale certs``."""
    stem = f"{role}-{name}"
    return Certificates(folder / f"{stem}.key", folder / f"{stem}.pem", folder / CA_FILE)


def of_cluster(run_folder: Path, role: Role, name: str) -> Certificates | None:
    """The files of one identity of a cluster on this machine; None without an authority."""
    folder = run_folder / FOLDER
    return in_folder(folder, role, name) if (folder / CA_FILE).exists() else None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a server process: its key, its certificate, the cluster's authority."""
    parser.add_argument(
        "--tls-key", type=Path, metavar="PEM", help="private key; needed to bind beyond loopback"
    )
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="PEM", help="certificate chain of --tls-key"
    )
    parser.add_argument(
        "--tls-ca",
        type=Path,
        metavar="PEM",
        help="authority of the cluster: all callers must present a certificate of it, whose role "
        "decides what they may call (`megascale certs` makes one)",
    )


def of_options(options: argparse.Namespace) -> Certificates | None:
    """The files of the options of :func:`add_options`; None without them.

    Raises:
        OptionError: they are incomplete, or cannot be used.
    """
    if bool(options.tls_key) != bool(options.tls_certificate):
        raise OptionError("--tls-key and --tls-certificate must be given together")
    if not options.tls_key:
        if options.tls_ca:
            raise OptionError("--tls-ca: give --tls-key and --tls-certificate with it")
        return None
    files = Certificates(options.tls_key, options.tls_certificate, options.tls_ca)
    files.check()
    return files
