"""Mistakes of users: each is reported in a sentence with the remedy, without a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from megascale_cli.app import build_app
from megascale_cli.exits import REFUSED, UNAVAILABLE, USAGE

JOB: dict[str, Any] = {
    "name": "a",
    "trainer": {
        "model": {
            "layers": 2,
            "hidden_size": 16,
            "heads": 2,
            "vocab_size": 257,
            "sequence_length": 16,
        },
        "training": {"steps": 2, "global_batch_size": 2},
        "data": {"sources": [{"prefix": "corpus"}]},
    },
}


def changed(**model: Any) -> dict[str, Any]:
    trainer = JOB["trainer"]
    return {**JOB, "trainer": {**trainer, "model": {**trainer["model"], **model}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files for the mistakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    files = {
        "good.yaml": yaml.safe_dump(JOB),
        "list.yaml": "- a\n- b\n",
        "broken.yaml": "name: [a\n",
        "twice.yaml": "name: a\nname: b\n",
        "unknown.yaml": yaml.safe_dump(changed(layerz=2)),
        "type.yaml": yaml.safe_dump(changed(layers="two")),
        "enum.yaml": yaml.safe_dump(changed(block="paralel")),
        "size.yaml": yaml.safe_dump(changed(heads=3)),
        "no_name.yaml": yaml.safe_dump({"trainer": JOB["trainer"]}),
        "bad_name.yaml": yaml.safe_dump({**JOB, "name": "My Job"}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (tmp_path / "empty").mkdir()
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale" / "token").write_text("x")
    (tmp_path / "broken.bin").write_bytes(b"")
    (tmp_path / "broken.idx").write_bytes(b"no index")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        # Wrong usage.
        ("sumbit good.yaml", USAGE, "No such command"),
        ("submit", USAGE, "Missing argument"),
        ("jobs --al", USAGE, "No such option"),
        ("logs a --rank five", USAGE, "--rank"),
        ("logs a --lines 0", USAGE, "--lines"),
        ("evict n1", USAGE, "--reason"),
        ("cordon n1", USAGE, "--reason"),
        ("init --preset 9b", USAGE, "tiny"),
        ("up --nodes 0", USAGE, "--nodes"),
        ("checkpoint fetch a", USAGE, "--to"),
        ("demo --steps 1", USAGE, "--steps"),
        ("demo --device cpu --tp 3", USAGE, "multiple"),
        # Job files.
        ("submit absent.yaml", USAGE, "absent.yaml: the job is refused"),
        ("submit empty", USAGE, "Is a directory"),
        ("submit binary.yaml", USAGE, "is not text"),
        ("submit broken.yaml", USAGE, "not valid YAML"),
        ("submit list.yaml", USAGE, "expected a mapping"),
        ("submit twice.yaml", USAGE, "'name' is given twice"),
        ("submit unknown.yaml", USAGE, "did you mean 'layers'?"),
        ("submit type.yaml", USAGE, "expected a whole number"),
        ("submit enum.yaml", USAGE, "did you mean 'parallel'?"),
        ("plan size.yaml", USAGE, "not a multiple of model.heads = 3"),
        ("plan no_name.yaml", USAGE, "name: missing"),
        ("plan bad_name.yaml", USAGE, "DNS-1123"),
        ("plan absent.yaml", USAGE, "No such file"),
        ("plan good.yaml --devices-per-node 0", USAGE, "--devices-per-node"),
        ("init --output good.yaml", USAGE, "--overwrite"),
        ("init --output nowhere/job.yaml", USAGE, "cannot be written"),
        ("init --name Not_A_Name --output new.yaml", USAGE, "DNS-1123"),
        # No cluster.
        ("jobs", UNAVAILABLE, "megascale up"),
        ("nodes --cluster nowhere", UNAVAILABLE, "no cluster at nowhere"),
        ("nodes --cluster empty", UNAVAILABLE, "holds no cluster"),
        ("up --cluster Nice_Name", USAGE, "a-z, 0-9"),
        ("up --device cuda --nodes 200 --run-folder new", USAGE, "--device cpu"),
        # Files of other kinds.
        ("data tokenize absent --output x", USAGE, "no such file"),
        ("data tokenize empty --output x", USAGE, "no non-empty file"),
        ("data inspect absent", USAGE, "absent"),
        ("data inspect broken", USAGE, "broken"),
        ("checkpoint verify ./empty", USAGE, "empty holds no commit log"),
        ("checkpoint verify /nowhere", USAGE, "checkpoint.uri"),
    ],
)
def test_a_mistake_is_reported(folder: Path, arguments: str, status: int, message: str) -> None:
    result = CliRunner().invoke(
        build_app(), arguments.split(), env={"COLUMNS": "200", "TERM": "dumb"}
    )
    text = result.stdout + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(
        result.exception
    )
    assert (result.exit_code, message in text) == (status, True), text
    assert "Traceback" not in text


def test_another_users_token_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    app = build_app()
    monkeypatch.setattr(Path, "read_text", refuse)  # root can read everything
    result = CliRunner().invoke(app, ["jobs", "--cluster", "stale"])
    assert (result.exit_code, "not yours to read" in result.stderr) == (REFUSED, True)
