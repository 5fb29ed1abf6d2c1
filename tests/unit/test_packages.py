"""Pins, the bill of materials, the check for advisories, and the comparison of protos."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deploy.packages import audit, sbom
from deploy.packages.pins import Pin, normalised, pins
from tests.harness.driver import here

Answer = Callable[[list[dict[str, Any]]], bytes]


def test_every_pin_is_one_component_and_what_the_wheel_needs_is_pinned() -> None:
    found = {pin.name: pin for pin in pins()}
    document = json.loads(sbom.SBOM.read_text())
    refs = [component["bom-ref"] for component in document["components"]]
    assert refs == [f"pkg:pypi/{pin.name}@{pin.version}" for pin in found.values()]
    scopes = {component["name"]: component["scope"] for component in document["components"]}
    named = ("grpcio", "torch", "starlette", "pytest", "flask-cors")
    assert [scopes[name] for name in named] == [
        "required", "optional", "optional", "excluded", "excluded",
    ]  # fmt: skip
    assert [pin.name for pin in found.values() if "" in pin.extras] == sorted(
        normalised(name)
        for name in scopes
        if f"pkg:pypi/{name}@{found[name].version}" in document["dependencies"][0]["dependsOn"]
        and scopes[name] == "required"
    )
    for name in ("grpcio", "protobuf", "uvloop", "structlog", "typer", "pyyaml"):
        assert "" in found[name].extras


def test_the_bill_of_materials_is_up_to_date() -> None:
    assert sbom.SBOM.read_text() == json.dumps(sbom.sbom(), indent=2) + "\n", "run `make sbom`"


def test_a_line_that_pins_nothing_is_an_error(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(here() / name, tmp_path)
    (tmp_path / "constraints.txt").write_text("boto3==1.44.5\ngrpcio>=1.66\n")
    with pytest.raises(ValueError, match=r"grpcio>=1\.66"):
        pins(tmp_path)


@contextmanager
def source(answer: Answer) -> Iterator[str]:
    """A server of OSV's interface whose answers a test makes up."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            text = answer(json.loads(body)["queries"]) if self.path == "/v1/querybatch" else b"{}"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def knows(**advisories: str) -> Answer:
    """Answers with one advisory for each named package."""
    return lambda queries: json.dumps(
        {
            "results": [
                {"vulns": [{"id": advisories[name]}]} if name in advisories else {}
                for query in queries
                for name in [query["package"]["name"]]
            ]
        }
    ).encode()


def outcome(capsys: pytest.CaptureFixture[str], address: str) -> tuple[int, dict[str, Any], str]:
    status = audit.main(["--source", address, "--timeout-s", "60"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out.splitlines()[-1]), captured.err


def known_bad(*, grpcio: bool) -> Answer:
    return lambda queries: json.dumps(
        {
            "results": [
                {"vulns": [{"id": "PYSEC-2020-96"}]}
                if (each["package"]["name"], each["version"]) == ("pyyaml", "5.3")
                or (grpcio and each["package"]["name"] == "grpcio")
                else {}
                for each in queries
            ]
        }
    ).encode()


def test_an_advisory_is_found_and_a_clean_answer_is_green(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with source(known_bad(grpcio=True)) as address:
        status, report, text = outcome(capsys, address)
    version = next(pin.version for pin in pins() if pin.name == "grpcio")
    assert (status, report["checked"]) == (1, True)
    assert report["affected"] == {f"grpcio=={version}": ["PYSEC-2020-96"]}
    assert f"grpcio {version}: PYSEC-2020-96" in text
    with source(known_bad(grpcio=False)) as address:
        status, report, _ = outcome(capsys, address)
    assert (status, report["checked"], report["affected"]) == (0, True, {})
    assert report["packages"] == len(pins())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (knows(), "prove nothing"),
        (lambda _: b"<html>please log in</html>", "JSON"),
        (lambda _: b"{}", "did not answer each"),
        (lambda queries: json.dumps({"results": [{}] * (len(queries) - 1)}).encode(), "each of"),
        (lambda queries: json.dumps({"results": ["no"] * len(queries)}).encode(), "OSV's form"),
    ],
)
def test_an_answer_that_proves_nothing_is_never_green(
    capsys: pytest.CaptureFixture[str], answer: Answer, problem: str
) -> None:
    with source(answer) as address:
        status, report, text = outcome(capsys, address)
    assert (status, report["checked"]) == (2, False)
    assert problem in report["problem"] and "NOT CHECKED" in text


def test_a_source_that_cannot_be_reached_is_never_green(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with source(knows()) as address:
        pass  # its port refuses connections from here on
    status, report, text = outcome(capsys, address)
    assert (status, report["checked"]) == (2, False)
    assert "cannot be reached" in report["problem"] and "NOT CHECKED" in text


def test_what_is_installed_is_asked_about_too() -> None:
    assert "pytest" in {pin.name for pin in audit.installed()}
    assert audit.advisories.__doc__ and Pin("megascale", "0") not in audit.installed()


def breaking(revision: str, tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(tree / "proto" / "breaking.py"), "--against", revision],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not shutil.which("buf") or not shutil.which("git"), reason="needs buf and git")
def test_a_field_that_moves_breaks_the_wire_contract(tmp_path: Path) -> None:
    """In a repository of its own, whose second state adds a field and whose third moves one."""
    shutil.copytree(
        here() / "proto", tmp_path / "proto", ignore=shutil.ignore_patterns("*.py[ci]", "*_pb2*")
    )

    def git(*words: str) -> None:
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    file = tmp_path / "proto/megascale/v1/job.proto"
    text = file.read_text()
    file.write_text(text.replace("string owner = 3;", "string owner = 3;\n  string site = 900;"))
    assert breaking("HEAD", tmp_path).returncode == 0
    file.write_text(text.replace("string owner = 3;", "string owner = 33;"))
    found = breaking("HEAD", tmp_path)
    assert found.returncode == 1 and '"owner"' in found.stdout + found.stderr
    assert breaking("no-such-tag", tmp_path).returncode == 2
