"""A private certificate authority in a folder, for teams without one of their own.

The folder has ``ca.pem`` and ``ca.key``, and ``ROLE-NAME.pem`` and ``.key`` for each identity; keys
have mode 0600. Hosts of the cluster need their own files and ``ca.pem``, never ``ca.key``. Needs
the package ``cryptography`` (extra ``tls``).
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale_common.node.files import replace_file
from megascale_common.service.errors import ExistsError, NotFoundError, OptionError
from megascale_common.service.identity.certificates import CA_FILE, Certificates, in_folder
from megascale_common.service.identity.peers import Role, spiffe_id
from megascale_job.names import is_dns_label

CA_KEY = "ca.key"
CA_DAYS, DAYS = 3650, 90
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SKEW = datetime.timedelta(minutes=10)  # clocks of hosts differ


def create(folder: Path, cluster: str, days: int = CA_DAYS) -> None:
    """Make the authority of a cluster.

    Raises:
        ExistsError: the folder has one already; a new one would not trust its certificates.
        OptionError: the package ``cryptography`` is not installed.
    """
    if (folder / CA_FILE).exists():
        raise ExistsError(f"{folder} has an authority already: issue certificates with it")
    x509, tools = _cryptography()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = tools.ec.generate_private_key(tools.ec.SECP256R1())
    name = _name(x509, f"megascale {cluster}")
    builder = _builder(x509, name, name, key.public_key(), days).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    usage |= {"key_cert_sign": True, "crl_sign": True}
    builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
    _write_key(folder / CA_KEY, key, tools)
    signed = builder.sign(key, tools.hashes.SHA256())
    replace_file(folder / CA_FILE, signed.public_bytes(tools.Encoding.PEM).decode())


def issue(
    folder: Path,
    cluster: str,
    role: Role,
    name: str,
    hosts: Sequence[str] = (),
    *,
    days: float = DAYS,
    trust_domain: str = "megascale.internal",
) -> Certificates:
    """Issue a certificate of the folder's authority, in place of an earlier one of this identity.

    Args:
        hosts: names and addresses at which it serves; those of loopback are always added.
        days: validity in days; a negative number makes an expired certificate.

    Raises:
        NotFoundError: the folder has no authority.
        OptionError: the name is not a DNS-1123 label, or ``cryptography`` is not installed.
    """
    if not is_dns_label(name):
        raise OptionError(f"--name {name!r}: use 1 to 63 of a-z, 0-9 and '-'")
    x509, tools = _cryptography()
    try:
        ca = x509.load_pem_x509_certificate((folder / CA_FILE).read_bytes())
        ca_key = tools.load_key((folder / CA_KEY).read_bytes(), None)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{error.filename} does not exist: make the authority with `megascale certs init`"
        ) from None
    key = tools.ec.generate_private_key(tools.ec.SECP256R1())
    names = [x509.UniformResourceIdentifier(spiffe_id(trust_domain, cluster, role, name))]
    names += [_host(x509, host) for host in dict.fromkeys((*hosts, *LOCAL_HOSTS))]
    builder = _builder(x509, _name(x509, f"{role} {name}"), ca.subject, key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    uses = [tools.usage.SERVER_AUTH, tools.usage.CLIENT_AUTH]
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    found = in_folder(folder, role, name)
    # The key first: a process that reads the pair in between finds that they do not match, and
    # keeps the old ones until both are replaced.
    _write_key(found.key, key, tools)
    signed = builder.sign(ca_key, tools.hashes.SHA256())
    replace_file(found.certificate, signed.public_bytes(tools.Encoding.PEM).decode())
    return found


class _Tools:
    """The parts of ``cryptography`` that are used here, except x509."""

    def __init__(self) -> None:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        self.ec = ec
        self.hashes = hashes
        self.usage = ExtendedKeyUsageOID
        self.Encoding = serialization.Encoding
        self.load_key: Any = serialization.load_pem_private_key
        self.serialization = serialization


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography import x509
    except ImportError:
        raise OptionError(
            "certificates need the package cryptography: "
            "install it with `pip install megascale[tls]`"
        ) from None
    return x509, _Tools()


def _name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(x509: Any, subject: Any, issuer: Any, public_key: Any, days: float) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    begin = min(now, end) - _SKEW
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _write_key(path: Path, key: Any, tools: Any) -> None:
    kinds = tools.serialization
    text = key.private_bytes(
        kinds.Encoding.PEM, kinds.PrivateFormat.PKCS8, kinds.NoEncryption()
    ).decode()
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
