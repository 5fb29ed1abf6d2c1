"""The PEM files of one process, for both sides of its connections, read again when they change.

With a certificate authority the connections of a cluster are mutual TLS: each side presents a
certificate of it and checks the other's. A certificate that is replaced on disk counts from the
next connection on; those that are open go on, so no job is broken by a renewal.

grpc is imported late: an agent sets what gRPC reads at its import first.
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
_Stamp = tuple[tuple[int, int], ...]  # of each file: when it was written, its size


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: a key, its certificate (with the chain), and the authority of the others.

    Without ``ca`` a server proves who it is and asks its clients for the cluster token alone.
    """

    key: Path
    certificate: Path
    ca: Path | None = None

    @property
    def mutual(self) -> bool:
        """Whether the other side has to present a certificate."""
        return self.ca is not None

    def check(self) -> None:
        """Raise an OptionError if the files cannot be used together."""
        self.context(ssl.PROTOCOL_TLS_SERVER)

    def context(self, protocol: int) -> ssl.SSLContext:
        """For a socket of Python, from the files as they are now; raises as :meth:`check`."""
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
                f"({error.strerror}): give PEM files that this user may read"
            ) from None
        return context

    def options(self) -> list[str]:
        """The options with which another process of the node uses the same files."""
        found = ["--tls-key", str(self.key), "--tls-certificate", str(self.certificate)]
        return [*found, "--tls-ca", str(self.ca)] if self.ca is not None else found

    def server_credentials(self) -> grpc.ServerCredentials:
        """What a server listens with; raises OptionError for files that cannot be used."""
        import grpc

        self.check()
        files = _Fresh(self)
        # None of the fetcher means "as before" (grpc's reference); its types leave that out.
        return grpc.dynamic_ssl_server_credentials(
            files.configuration(),
            files.changed,  # type: ignore[arg-type]
            require_client_authentication=self.mutual,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """What a channel connects with, from the files as they are now.

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
    """The files of a server; a handshake that finds them changed gets the new ones."""

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
        """In a thread of gRPC, at each handshake: the new files; None for those in use."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            self._files.check()  # a key that was replaced before its certificate
            found = self.configuration()
        except (OSError, OptionError) as error:
            _log.warning("new certificates cannot be used; the old ones stay", error=str(error))
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
    """The files of one identity in a folder as ``megascale certs`` fills it."""
    stem = f"{role}-{name}"
    return Certificates(folder / f"{stem}.key", folder / f"{stem}.pem", folder / CA_FILE)


def of_cluster(run_folder: Path, role: Role, name: str) -> Certificates | None:
    """Those of one identity of a cluster of this machine; None where it has no authority."""
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
        help="authority of the cluster: all others must present a certificate of it, whose role "
        "says what they may call (`megascale certs` makes one)",
    )


def of_options(options: argparse.Namespace) -> Certificates | None:
    """The files of those options; None without them.

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
