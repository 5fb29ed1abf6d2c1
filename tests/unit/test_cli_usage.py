"""Wrong usage in the form of all other errors, the version, and readers that leave early."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness import program_start
from tests.harness.command_line import application, command
from tests.harness.exporting import MODELS, STEP, job_of, write_model
from typer.testing import CliRunner

from megascale_checkpoint.checksums import dump_record
from megascale_cli.exits import INTERRUPTED, UNAVAILABLE, USAGE

# More than a pipe of a page holds, so that the writer is still writing when its reader ends.
PIPE_BYTES, FIELDS = 4096, 2_000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with no cluster to be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "field", "problem", "remedy"),
    [
        ("no-such-command --json", "", "No such command", "see `megascale --help`"),
        ("--json jobs", "--json", "No such option", "see `megascale --help`"),
        ("jobs --wrong --json", "--wrong", "No such option", "see `megascale jobs --help`"),
        ("--json logs a --rank five", "--json", "No such option", "see `megascale --help`"),
        ("logs --json a --rank five", "--rank", "Invalid value", "see `megascale logs --help`"),
        ("logs a --grep ( --json", "--grep", "not a pattern", "see `megascale logs --help`"),
        ("evict --json n1", "--reason", "Missing option", "see `megascale evict --help`"),
        ("profile x --ranks 0;1 --json", "--ranks", "give ranks", "see `megascale profile --help`"),
        ("up --nodes -1 --json", "--nodes", "Invalid value", "see `megascale up --help`"),
        ("pipeline draw --zz --json", "--zz", "No such", "see `megascale pipeline draw --help`"),
        ("checkpoint fetch a --json", "--to", "Missing", "see `megascale checkpoint fetch --help`"),
        ("checkpoint wrong --json", "", "No such command", "see `megascale checkpoint --help`"),
    ],
)
def test_wrong_usage_is_an_object_with_json(
    arguments: str, field: str, problem: str, remedy: str
) -> None:
    result = CliRunner().invoke(application(), arguments.split())
    assert result.exit_code == USAGE, result.output
    (line,) = result.stderr.splitlines()
    found = json.loads(line)
    assert (found["kind"], found["reason"]) == ("InvalidRequest", "USAGE")
    (shown,) = found["problems"]
    assert problem in shown["problem"] and shown["remedy"] == remedy
    assert field in shown["field"]
    assert result.stdout == ""


def test_wrong_usage_is_one_line_for_people() -> None:
    result = CliRunner().invoke(application(), ["logs", "a", "--rank", "five"])
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith("see `megascale logs --help`")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("logs a --rank five", "Invalid value for '--rank': give a whole number;"),
        ("logs a --rank 1.5", "Invalid value for '--rank': give a whole number;"),
        ("logs a --rank -1", "Invalid value for '--rank': give 0 or more;"),
        ("timeline a --steps 99", "Invalid value for '--steps': give 50 or less;"),
        ("up --heartbeat-interval-s x", "give a number;"),
        ("up --device tpu", "'--device': 'tpu' is not one of 'auto', 'cpu', 'cuda';"),
        ("init --model 9b", "'--model': '9b' is not one of 'tiny',"),
        ("data tokenize x -o y --vocab-size q", "'--vocab-size': give a whole number;"),
    ],
)
def test_a_bad_value_is_said_in_plain_words(arguments: str, said: str) -> None:
    error = CliRunner().invoke(application(), arguments.split()).stderr
    assert said in error, error
    assert not [word for word in ("Input", "Value error", "parse") if word in error]


def test_the_version_is_an_option_too() -> None:
    option, command = (CliRunner().invoke(application(), [way]) for way in ("--version", "version"))
    assert (option.exit_code, option.output) == (0, command.output)


def until_first_line(*arguments: str) -> tuple[int, bytes, bytes]:
    """Run a command, read one line of its output and close the pipe, as `head -1` does."""
    with subprocess.Popen(
        [sys.executable, "-m", "megascale_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        fcntl.fcntl(process.stdout.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        line = os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
    return process.returncode, line, errors


def test_a_reader_that_leaves_ends_a_command_quietly(folder: Path) -> None:
    layers = "\n".join(f"    l{number}: {number}" for number in range(FIELDS))
    (folder / "job.yaml").write_text(f"name: a\nlabels:\n{layers}\n")
    status, first, errors = until_first_line("config", "show", "job.yaml")
    assert (status, first, errors) == (0, b"n", b"")


@pytest.mark.parametrize(
    "command",
    [
        "version",
        "init --output -",
        "data tokenize text --output other",
        "data inspect corpus",
        "plan search --help",
        "pipeline draw --stages 4 --micro-batches 16",
        "platform list",
        "checkpoint verify --help",
    ],
)
@pytest.mark.parametrize("streams", ["", "2>&1"])
def test_a_reader_that_has_left_before_is_no_failure(
    folder: Path, command: str, streams: str
) -> None:
    (folder / "text").write_text("some text")
    if "inspect" in command:
        made = CliRunner().invoke(application(), ["data", "tokenize", "text", "--output", "corpus"])
        assert made.exit_code == 0
    left, output = os.pipe()
    os.close(left)
    with program_start.start(
        [sys.executable, "-m", "megascale_cli", *command.split()],
        stdout=output,
        stderr=output if streams else subprocess.PIPE,
    ) as process:
        os.close(output)
        _, errors = process.communicate()
    assert (process.returncode, errors or b"") == (0, b"")


def test_an_error_keeps_its_status_where_its_reader_has_left() -> None:
    program = f"{sys.executable} -m megascale_cli jobs --cluster nowhere 2>&1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} | true"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (UNAVAILABLE, b"")


def test_ctrl_c_while_the_commands_are_imported_ends_quietly() -> None:
    program = (
        "import os, signal, sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'megascale_cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "sys.argv = ['megascale', '--help']\n"
        "from megascale_cli.__main__ import main\n"
        "main()\n"
    )
    shell = ["bash", "-c", f"{shlex.quote(sys.executable)} -c {shlex.quote(program)}; exit $?"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (INTERRUPTED, "")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "interrupted"),
    [
        ("plan job.yaml", "megascale_cli.jobfile.load_job"),
        ("data tokenize text --output corpus", "megascale_trainer.commands.data._find"),
        ("jobs --cluster x", "megascale_client.AsyncClient.from_run_folder"),
    ],
)
def test_ctrl_c_ends_every_command_with_its_status(
    monkeypatch: pytest.MonkeyPatch, arguments: str, interrupted: str
) -> None:
    def ctrl_c(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, ctrl_c)
    result = CliRunner().invoke(application(), arguments.split())
    assert (result.exit_code, result.output) == (INTERRUPTED, "")


@pytest.mark.parametrize("command", ["up", "checkpoint verify"])
def test_a_command_that_cannot_be_loaded_is_an_object_with_json(command: str) -> None:
    program = (
        "import sys\n"
        "for name in ('numpy', 'megascale_driver', 'megascale_checkpoint'):\n"
        "    sys.modules[name] = None\n"
        "from megascale_cli.app import build_app\n"
        f"build_app()({[*command.split(), 'x', '--json']}, prog_name='megascale')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == USAGE
    found = json.loads(done.stderr)
    assert (found["reason"], "pip install" in found["problems"][0]["remedy"]) == (
        "NOT_INSTALLED",
        True,
    )


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\x08[bold]"
OBEYED = ("\x1b", "\x07", "\x9b", "\u202e", "\x08")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name, and whose files' names and texts, have what a terminal obeys."""
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE
    config = job_of({**MODELS["llama"][1], "vocab_size": 257})
    for name in ("job", "damaged"):
        uri = Path(write_model(folder / name, config))
        values = {k: v for k, v in json.loads(uri.read_bytes()).items() if k != "xxh3"}
        values["small_state"]["tokenizer"] = {"path": HOSTILE}
        if name == "job":
            (folder / "fetched").mkdir()
            for path in uri.parent.iterdir():
                (folder / "fetched" / path.name).write_bytes(path.read_bytes())
            (folder / "fetched" / uri.name).write_bytes(dump_record(values))
    (folder / "job/attempts/attempt-000000").symlink_to(folder)
    record = folder / "damaged/commits/000000000001.json"
    record.write_bytes(dump_record({"version": 2, "seq": 1, "attempt": 1, "kind": HOSTILE}))
    (folder / "texts").mkdir()
    (folder / "texts" / HOSTILE).write_text(HOSTILE)
    (folder / "lines.json").write_text(f'{{"tex": "{HOSTILE}"}}')
    command("data", "tokenize", folder / "texts", "--output", folder / "corpus")
    command("checkpoint", "export", folder / "fetched", "--to", folder / "hf", "--format", "hf")
    command("certs", "init", "--folder", folder / "tls")
    site = {"nccl": "2.27", "nics": [HOSTILE]}
    (folder / "site").write_text(json.dumps(site))
    (folder / "environment").write_text(f"NCCL_IB_HCA={HOSTILE}\n")
    (folder / "broken").write_text(f"NCCL_{HOSTILE}\n")
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text("")
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "checkpoint list FOLDER/job",
        "checkpoint show FOLDER/job",
        "checkpoint verify FOLDER/job",
        "checkpoint gc FOLDER/job",
        "checkpoint repair FOLDER/damaged",
        "checkpoint pin FOLDER/job --step STEP --reason HOSTILE",
        "checkpoint pin FOLDER/job --step 1 --reason HOSTILE",
        "checkpoint unpin FOLDER/job --step STEP",
        "checkpoint export FOLDER/fetched --to FOLDER/hf-again --format hf",
        "checkpoint export FOLDER/fetched --to FOLDER/dcp --format dcp",
        "checkpoint export FOLDER/none --to FOLDER/out --format dcp",
        "checkpoint import FOLDER/hf --to FOLDER/imported --format hf",
        "checkpoint import FOLDER/none --to FOLDER/imported --format hf",
        "code push FOLDER/package --to FOLDER/code",
        "code push FOLDER/none --to FOLDER/code",
        "net render --nics HOSTILE",
        "net render --site FOLDER/site",
        "net render --site FOLDER/site --env",
        "net render --site FOLDER/none",
        "net verify FOLDER/environment",
        "net verify FOLDER/broken",
        "net verify FOLDER/none",
        "data tokenize FOLDER/texts --output FOLDER/other",
        "data tokenize FOLDER/texts --output FOLDER/corpus",
        "data tokenize FOLDER/lines.json --format jsonl --output FOLDER/lines",
        "data tokenize FOLDER/none --output FOLDER/other",
        "data inspect FOLDER/corpus",
        "data inspect FOLDER/none",
        "certs init --folder FOLDER/tls-again",
        "certs init --folder FOLDER/tls --cluster HOSTILE",
        "certs issue --folder FOLDER/tls --role driver --name HOSTILE",
        "certs person --role viewer --name ada --file FOLDER/people",
        "certs person --role viewer --name HOSTILE --file FOLDER/people",
        "pipeline draw --stages 2 --micro-batches 2 --svg FOLDER/none/x.svg",
    ],
)
def test_names_and_texts_of_files_are_shown_and_not_sent_to_the_terminal(
    hostile: Path, words: str
) -> None:
    parts = [
        each.replace("FOLDER", str(hostile)).replace("STEP", str(STEP)) for each in words.split()
    ]
    answer = command(*(each.replace("HOSTILE", HOSTILE) for each in parts))
    assert answer.text, "something is printed"
    assert not [sign for sign in OBEYED if sign in answer.text], answer.text
