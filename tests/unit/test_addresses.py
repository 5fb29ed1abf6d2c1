"""Addresses as host:port, and which one of a host the others reach."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import pytest

from megascale_common.node.addresses import (
    interface_of,
    is_loopback,
    joined,
    listen,
    on_route_to,
    split,
)
from megascale_common.service.errors import OptionError
from megascale_common.service.metrics import MetricsServer, bind_option, registry_of
from megascale_common.service.server import RpcServer
from megascale_common.service.start import require_bindable
from megascale_executor.agent.__main__ import config_from, parser
from megascale_trainer.process.system import GLOO, NCCL, pin_interface


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [("10.0.0.7", "10.0.0.7:80"), ("n7", "n7:80"), ("fd00::7", "[fd00::7]:80")],
)
def test_an_endpoint_is_joined_and_split(host: str, endpoint: str) -> None:
    assert joined(host, 80) == endpoint
    assert split(endpoint) == (host, 80)
    assert joined(f"[{host}]", 80) == endpoint


def test_an_ipv6_address_may_stand_without_brackets() -> None:
    """As `$POD_IP:7790` of a manifest gives it."""
    assert split("fd00::7:7790") == ("fd00::7", 7790)
    assert bind_option("fd00::7:7790") == "[fd00::7]:7790" and bind_option("") == ""
    for text in ("fd00::7", "n7", "n7:70000", ":7790"):
        if text == "fd00::7":
            assert bind_option(text) == "[fd00:]:7", "which no host has: it is refused at the start"
            with pytest.raises(OptionError, match="not an address"):
                require_bindable("--metrics-bind", bind_option(text))
        else:
            with pytest.raises(argparse.ArgumentTypeError, match="is not HOST:PORT"):
                bind_option(text)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
@pytest.mark.parametrize("bind", ["::1:0", "[::1]:0"])
async def test_servers_on_ipv6_name_their_address_with_brackets(bind: str) -> None:
    try:
        listen("::1", backlog=1).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    metrics, server = MetricsServer(registry_of("test")), RpcServer("a-token-of-enough-characters")
    try:
        for address in (await metrics.start(bind), await server.start(bind, [])):
            assert address.startswith("[::1]:")
            with socket.create_connection(split(address), timeout=10.0):
                pass
    finally:
        await metrics.stop()
        await server.stop(0)


@pytest.mark.parametrize("text", ["", "n7", ":80", "n7:", "n7:x", "n7:65536", "n7:-1", "n7:٣"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_a_socket_listens_on_either_family(host: str) -> None:
    try:
        listening = listen(host, backlog=1)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with (
        listening,
        socket.create_connection((host.strip("[]"), listening.getsockname()[1]), timeout=10.0),
    ):
        assert on_route_to(host) == host.strip("[]")


def test_the_loopback_addresses_are_only_reached_from_here() -> None:
    assert all(map(is_loopback, ("127.0.0.2", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "n7", "0.0.0.0", "[::]")))


def test_an_address_has_an_interface() -> None:
    assert interface_of("127.0.0.1") == interface_of("::1") == "lo"
    assert interface_of("192.0.2.99") == interface_of("2001:db8::99") == ""


def test_collectives_use_the_interface_on_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (GLOO, NCCL):
        monkeypatch.delenv(variable, raising=False)
    assert pin_interface("127.0.0.1", cuda=True) == ""
    assert pin_interface("127.0.0.1", cuda=False) == "lo"
    monkeypatch.setenv(GLOO, "ib0")
    assert pin_interface("127.0.0.1", cuda=False) == "ib0", "what somebody has set stays"


def agent_options(tmp_path: Path, *options: str) -> str:
    """The address that an agent takes for these options."""
    arguments = [
        *("--cluster", "c", "--node", "n1", "--device", "cpu", "--devices", "0"),
        *("--token-file", str(tmp_path / "token"), "--run-folder", str(tmp_path)),
        *("--address-file", str(tmp_path / "address"), *options),
    ]
    return config_from(parser().parse_args(arguments)).host


def test_an_agent_serves_at_the_address_on_the_route_to_its_driver(tmp_path: Path) -> None:
    assert agent_options(tmp_path, "--driver", "127.0.0.1:7070") == "127.0.0.1"
    assert agent_options(tmp_path, "--driver", "[::1]:7070") == "::1"
    assert agent_options(tmp_path, "--driver", "n1:7070", "--host", "[fd00::7]") == "fd00::7"
    assert agent_options(tmp_path, "--driver-file", str(tmp_path / "absent")) == "127.0.0.1"
    with pytest.raises(OptionError, match="--host: no route to the driver"):
        agent_options(tmp_path, "--driver", "no host:7070")


@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces are those of Linux")
def test_the_interface_of_a_route_is_one_of_this_host() -> None:
    try:
        own = on_route_to("192.0.2.99")
    except OSError:
        pytest.skip("this machine has no route to other hosts")
    assert interface_of(own) in {name for _, name in socket.if_nameindex()}
