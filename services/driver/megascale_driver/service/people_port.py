"""The driver's second port, for people: TLS without client certificates, one token per person.

Nodes and programs show certificates at the first port. A browser, a laptop or a CI job often has
no certificate. At this port it shows a personal token, from a file or an OpenID provider, and can
call only DriverService. The cluster's token is not accepted here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megascale_common.service import logs
from megascale_common.service.errors import OptionError
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role
from megascale_common.service.identity.people import ROLES, Oidc, OidcConfig, People
from megascale_common.service.server import RpcServer
from megascale_common.service.start import write_address
from megascale_driver.service.driver_service import NAME, DriverService

_log = logs.get(__name__)


class PeoplePort:
    """The port for people; without ``--people-bind`` it does nothing.

    Raises:
        OptionError: the options contradict each other, or a file cannot be used.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        token: str,
        tls: Certificates | None,
        service: DriverService,
    ) -> None:
        self._options = options
        self._server: RpcServer | None = None
        file, issuer = options.people_tokens, options.oidc_issuer
        if not options.people_bind:
            if file or issuer:
                raise OptionError("--people-bind: give the address at which people are served")
            return
        if not file and not issuer:
            raise OptionError("--people-bind: give --people-tokens or --oidc-issuer with it")
        oidc = Oidc(config_of(options)) if issuer else None
        # No certificate authority: people show no certificate that would have to be checked.
        own = Certificates(tls.key, tls.certificate) if tls is not None else None
        self._server = RpcServer(token, tls=own, people=People(file, oidc))
        service.add_to(self._server.server)

    async def start(self) -> None:
        """Start to listen."""
        if self._server is None:
            return
        address = await self._server.start(self._options.people_bind, [NAME], serving=False)
        if self._options.people_address_file is not None:
            write_address("--people-address-file", self._options.people_address_file, address)
        _log.info("people are served", address=address)

    async def set_serving(self, leads: bool) -> None:
        """Report whether this driver leads."""
        if self._server is not None:
            await self._server.set_serving(NAME, leads)

    async def stop(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` for calls to end, then close."""
        if self._server is not None:
            await self._server.stop(grace_s)


def config_of(options: argparse.Namespace) -> OidcConfig:
    """The OpenID provider from the options; raises OptionError for a malformed role."""
    values = {}
    for text in options.oidc_role or ():
        role, equals, value = text.partition("=")
        if not equals or not value or role not in ROLES:
            raise OptionError(f"--oidc-role {text!r}: write {'|'.join(ROLES)}=VALUE")
        values[value] = Role(role)
    defaults = {"roles": values} if values else {}
    return OidcConfig(
        issuer=options.oidc_issuer,
        audience=options.oidc_audience,
        keys_url=options.oidc_jwks,
        role_claim=options.oidc_role_claim,
        name_claim=options.oidc_name_claim,
        **defaults,
    )


def add_people_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this port."""
    add = parser.add_argument_group("people with tokens").add_argument
    add("--people-bind", default="", metavar="HOST:PORT", help="address for people; default: none")
    add("--people-address-file", type=Path, metavar="FILE", help="write its host:port to this file")
    add(
        "--people-tokens",
        type=Path,
        metavar="FILE",
        help="names, roles and digests of tokens (`megascale certs person`); read when it changes",
    )
    add("--oidc-issuer", default="", metavar="URL", help="accept tokens of this OpenID provider")
    add("--oidc-audience", default="", metavar="TEXT", help="audience that the tokens must name")
    add("--oidc-jwks", default="", metavar="URL", help="its keys; default: found by discovery")
    add("--oidc-role-claim", default="roles", metavar="CLAIM", help="default %(default)s")
    add(
        "--oidc-role",
        action="append",
        metavar="ROLE=VALUE",
        help="value of that claim that makes its holder a viewer or an operator; may be repeated; "
        "default: the names of the roles",
    )
    add("--oidc-name-claim", default="sub", metavar="CLAIM", help="the name in the audit log")
