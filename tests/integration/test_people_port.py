"""People at a real driver: by a token of a file, and by one of a provider, an HTTP server here."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from tests.harness.driver import DriverProcess
from tests.harness.etcd import etcd_server
from tests.harness.waiting import eventually

from megascale.v1 import driver_pb2
from megascale_client import AsyncClient, NotAllowed, Unavailable
from megascale_common.etcd.server import EtcdServer
from megascale_common.service import status
from megascale_common.service.errors import (
    ForbiddenError,
    OptionError,
    UnauthenticatedError,
    UnavailableError,
)
from megascale_common.service.identity import authority
from megascale_common.service.identity import people as identity_people
from megascale_common.service.identity.peers import Role
from megascale_common.service.identity.people import Oidc, OidcConfig, add_person

__all__ = ["etcd_server"]  # a fixture
AUDIENCE = "megascale"
ECDSA, RSA = "ES256", "RS256"


class Provider:
    """An OpenID provider: serves its discovery document and its keys, and signs tokens."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.reads = 0
        self.broken = False
        self.add_key("first", RSA)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.issuer = f"http://127.0.0.1:{self._server.server_port}/realm"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def add_key(self, name: str, algorithm: str) -> None:
        made = (
            rsa.generate_private_key(65537, 2048)
            if algorithm == RSA
            else ec.generate_private_key(ec.SECP256R1())
        )
        self.keys[name] = (made, algorithm)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def token(self, key: str = "first", **claims: Any) -> str:
        private, algorithm = self.keys[key]
        whole = {"iss": self.issuer, "aud": AUDIENCE, "sub": "ada@example.org",
                 "exp": time.time() + 60, "roles": ["operator"], **claims}  # fmt: skip
        whole = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(whole, private, algorithm=algorithm, headers={"kid": key})

    def key_set(self) -> dict[str, Any]:
        found = []
        for name, (private, algorithm) in self.keys.items():
            kind = jwt.algorithms.get_default_algorithms()[algorithm]
            public = json.loads(kind.to_jwk(private.public_key()))
            found.append({**public, "kid": name, "alg": algorithm, "use": "sig"})
        return {"keys": found}

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                documents = {
                    "/realm/.well-known/openid-configuration": {
                        "issuer": provider.issuer, "jwks_uri": f"{provider.issuer}/keys"
                    },
                    "/realm/keys": provider.key_set(),
                }  # fmt: skip
                provider.reads += self.path == "/realm/keys"
                found = documents.get(self.path)
                self.send_response(200 if found and not provider.broken else 500)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.close()


def checker(provider: Provider, **config: Any) -> Oidc:
    return Oidc(OidcConfig(issuer=provider.issuer, audience=AUDIENCE, **config))


async def test_a_token_of_the_provider_gives_name_and_role(provider: Provider) -> None:
    found = await checker(provider).peer(provider.token())
    assert (found.role, found.name, found.by_token) == (Role.OPERATOR, "ada@example.org", True)
    groups = {"ml-oncall": Role.OPERATOR, "everybody": Role.VIEWER}
    by_group = checker(provider, role_claim="groups", roles=groups, name_claim="email")
    token = provider.token(groups=["everybody"], email="grace@example.org")
    found = await by_group.peer(token)
    assert (found.role, found.name) == (Role.VIEWER, "grace@example.org")


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": 1.0}, "expired"),
        ({"exp": None}, "exp"),
        ({"aud": "another"}, "[Aa]udience"),
        ({"aud": None}, "aud"),
        ({"iss": "https://another.example.org"}, "[Ii]ssuer"),
        ({"nbf": 9e9}, "not yet valid"),
        ({"sub": ""}, "no claim 'sub'"),
    ],
)
async def test_a_token_that_does_not_count_is_refused(
    provider: Provider, claims: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnauthenticatedError, match=why):
        await checker(provider).peer(provider.token(**claims))


async def test_a_token_of_somebody_elses_key_is_refused(provider: Provider) -> None:
    other = Provider()
    other.close()
    with pytest.raises(UnauthenticatedError, match="not valid: Signature"):
        await checker(provider).peer(other.token(iss=provider.issuer))
    claims, header = {"iss": provider.issuer}, {"kid": "first"}
    secret = jwt.encode(claims, "x" * 32, algorithm="HS256", headers=header)
    for token in (secret, jwt.encode(claims, None, algorithm="none", headers=header)):
        with pytest.raises(UnauthenticatedError, match="is signed with"):
            await checker(provider).peer(token)
    for token in ("a.b.c", "..", "é.é.é"):
        with pytest.raises(UnauthenticatedError):
            await checker(provider).peer(token)


async def test_a_person_without_a_role_here_may_do_nothing(provider: Provider) -> None:
    for roles in (None, [], "root", ["driver"], 7, {"operator": True}):
        with pytest.raises(ForbiddenError, match="none of operator, viewer"):
            await checker(provider).peer(provider.token(roles=roles))


async def test_new_keys_count_and_unknown_ones_cost_no_reads(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = checker(provider, keys_url=f"{provider.issuer}/keys")
    await check.peer(provider.token())
    assert provider.reads == 1
    provider.add_key("second", ECDSA)
    with pytest.raises(UnauthenticatedError, match="a key that"):
        await check.peer(provider.token("second"))
    assert provider.reads == 1, "the keys were read a moment ago"
    monkeypatch.setattr(identity_people, "RETRY_S", 0.0)
    assert (await check.peer(provider.token("second"))).name == "ada@example.org"
    provider.broken = True
    monkeypatch.setattr(identity_people, "KEYS_FRESH_S", 0.0)
    assert await check.peer(provider.token("second")), "the keys of before are usable"
    with pytest.raises(UnavailableError, match="cannot be read now"):
        await checker(provider).peer(provider.token())


@pytest.mark.parametrize("url", ["http://10.0.0.1/x", "file:///etc/passwd", "ftp://x/y", "x"])
def test_keys_are_read_from_where_nobody_can_change_them(url: str) -> None:
    with pytest.raises(OptionError, match="give an https URL"):
        OidcConfig(issuer="https://id.example.org", audience="x", keys_url=url)


@contextlib.asynccontextmanager
async def served(driver: DriverProcess, path: Path, token: str) -> AsyncIterator[AsyncClient]:
    """A client of a person, who has a token and the authority's certificate."""
    async with AsyncClient(
        path.read_text().strip(), token, root_certificate=driver.folder / "tls" / "ca.pem",
        retry_for_s=0.0,
    ) as client:  # fmt: skip
        yield client


async def test_people_call_a_driver_by_file_and_by_provider(
    etcd_server: EtcdServer, tmp_path: Path, provider: Provider
) -> None:
    authority.create(tmp_path / "tls", "test")
    tls = authority.issue(tmp_path / "tls", "test", Role.DRIVER, "one")
    people, address = tmp_path / "people", tmp_path / "people.address"
    viewer, operator = (
        add_person(people, role.value, role) for role in (Role.VIEWER, Role.OPERATOR)
    )
    driver = DriverProcess(
        tmp_path, etcd_server.endpoint, None, "driver", "--people-bind", "127.0.0.1:0",
        "--people-address-file", str(address), "--people-tokens", str(people),
        "--oidc-issuer", provider.issuer, "--oidc-audience", AUDIENCE,
        "--tls-key", str(tls.key), "--tls-certificate", str(tls.certificate),
    )  # fmt: skip
    try:
        await driver.start(leads=False)
        async with served(driver, address, operator) as client:
            await _until_it_leads(client)
            assert await client.set_quota("team", 8, reason="tried") is not None
        async with served(driver, address, provider.token()) as client:
            await client.set_quota("team", 16, reason="tried")
            actors = [
                e.actor async for e in client.events("cluster") if e.reason.startswith("QUOTA")
            ]
            assert actors == ["operator", "ada@example.org"], "the audit log has who"
        async with served(driver, address, viewer) as client:
            assert [node async for node in client.nodes()] == []
            with pytest.raises(NotAllowed, match="viewer/viewer may not call SetQuota"):
                await client.set_quota("team", 0, reason="to see whether I may")
        for stranger in (driver.token, "x" * 40, provider.token(aud="another")):
            async with served(driver, address, stranger) as client:
                with pytest.raises(NotAllowed):
                    await client.cluster_info()
        await _the_link_is_not_served(driver, address, operator)
    finally:
        await driver.close()


async def _until_it_leads(client: AsyncClient) -> None:
    async def leads() -> bool:
        with contextlib.suppress(Unavailable):
            return bool((await client.cluster_info()).leader)
        return False

    await eventually(leads, "the driver leads")


async def _the_link_is_not_served(driver: DriverProcess, path: Path, token: str) -> None:
    root = grpc.ssl_channel_credentials((driver.folder / "tls" / "ca.pem").read_bytes())
    async with grpc.aio.secure_channel(path.read_text().strip(), root) as channel:
        call = channel.unary_unary("/megascale.v1.ExecutorLinkService/ReportSteps")
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call(b"", metadata=(("authorization", f"Bearer {token}"),))
        assert found.value.code() == grpc.StatusCode.UNIMPLEMENTED
        info = channel.unary_unary(
            "/megascale.v1.DriverService/GetClusterInfo",
            request_serializer=driver_pb2.GetClusterInfoRequest.SerializeToString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await info(driver_pb2.GetClusterInfoRequest())
        assert status.read(found.value).reason == "NO_TOKEN"
