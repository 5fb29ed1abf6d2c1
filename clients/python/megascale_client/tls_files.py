"""The PEM files with which a client connects, and where a run folder has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import grpc

from megascale_client.errors import NotAllowed

FOLDER, CA_FILE = "tls", "ca.pem"  # in a run folder whose cluster has an authority
# Another identity than the operator of the run folder, such as a viewer's.
CERTIFICATE_VARIABLE, KEY_VARIABLE = "MEGASCALE_TLS_CERTIFICATE", "MEGASCALE_TLS_KEY"
_OPERATOR = "operator-operator"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The authority that is trusted and, where it asks for one, the client's own certificate."""

    root_certificate: Path
    certificate: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel connects with, from the files as they are now.

        Raises:
            NotAllowed: one of them cannot be read.
        """
        try:
            root = self.root_certificate.read_bytes()
            key = self.key.read_bytes() if self.key is not None else None
            chain = self.certificate.read_bytes() if self.certificate is not None else None
        except OSError as error:
            raise NotAllowed(
                f"{error.filename} cannot be read ({error.strerror}): give PEM files that this "
                f"user may read, in ${CERTIFICATE_VARIABLE} and ${KEY_VARIABLE} or as arguments"
            ) from None
        return grpc.ssl_channel_credentials(root, key, chain)


def given(
    root_certificate: Path | None, certificate: Path | None, key: Path | None
) -> TlsFiles | None:
    """The files as arguments.

    Raises:
        ValueError: a certificate without its key or without an authority, or the other way round.
    """
    if (certificate is None) != (key is None) or (certificate and not root_certificate):
        raise ValueError("give certificate and key together, and root_certificate with them")
    return TlsFiles(root_certificate, certificate, key) if root_certificate is not None else None


def of_run_folder(folder: Path) -> TlsFiles | None:
    """The files for the cluster of a run folder; None where its connections are not encrypted."""
    own = folder / FOLDER
    if not (own / CA_FILE).exists():
        return None
    certificate = os.environ.get(CERTIFICATE_VARIABLE) or own / f"{_OPERATOR}.pem"
    key = os.environ.get(KEY_VARIABLE) or own / f"{_OPERATOR}.key"
    return TlsFiles(own / CA_FILE, Path(certificate), Path(key))
