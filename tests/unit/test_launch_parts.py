"""Parts of a run by hand: its job file, its place, its options and what it shows."""

from __future__ import annotations

import argparse
import io
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.harness.by_hand import small_job, write_job
from tests.harness.waiting import until

from megascale_common.node import framing
from megascale_common.node.messages import Accepted, Saves
from megascale_job.config import JobConfig
from megascale_job.job_file import load_config
from megascale_job.problems import JobError
from megascale_trainer.launch import command, host_services, meeting
from megascale_trainer.launch.display import Display, duration
from megascale_trainer.launch.host_services import HostServices, ServiceFailed
from megascale_trainer.launch.local_agent import LocalAgent, Outlets, SaveWatch, Watched
from megascale_trainer.launch.meeting import Meeting, MeetingFailed
from megascale_trainer.launch.place import LOOPBACK, Place, own_address
from megascale_trainer.launch.run import _refuse_unreachable

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "h0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
RECORD: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "tokens_per_s": 12_345.0,
    "mfu_causal": 0.412,
    "mfu_full": 0.43,
    "memory_bytes": 3 << 30,
    "data_wait_s": 0.0004,
    "step_time_s": 0.25,
}


def job(folder: Path, **sections: Any) -> JobConfig:
    return load_config(write_job(folder, small_job(folder, **sections)))


def test_the_same_job_in_yaml_and_json_with_paths_from_the_files_folder(tmp_path: Path) -> None:
    values = small_job(tmp_path)
    as_json = load_config(write_job(tmp_path, values))
    # JSON is YAML: the suffix decides which reader is used.
    assert load_config(write_job(tmp_path, values, "job.yaml")) == as_json
    assert as_json.data.sources[0].prefix == str(tmp_path / "corpus")
    assert as_json.checkpoint.uri == str(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("{", "job.json", "is not JSON"),
        ("a: [", "job.yaml", "is not valid YAML"),
        ("name: a\nname: b\n", "job.yaml", "'name' is given twice"),
        ("name: a\n", "job.yaml", "trainer.model"),
        ("[]", "job.json", "job"),
    ],
)
def test_a_bad_job_file_is_refused_with_what_is_wrong(
    tmp_path: Path, text: str, name: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(JobError) as refused:
        load_config(tmp_path / name)
    assert words in str(refused.value)
    with pytest.raises(JobError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_yaml_without_pyyaml_names_the_remedy(tmp_path: Path) -> None:
    write_job(tmp_path, small_job(tmp_path), "job.yaml")
    code = (
        "import sys; sys.modules['yaml'] = None; "
        "from megascale_job.job_file import load_config; load_config(sys.argv[1])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pip install pyyaml" in found.stderr


def test_a_place_is_what_torchrun_says(tmp_path: Path) -> None:
    assert Place.of({}) == Place()
    place = Place.of(TORCHRUN)
    assert (place.rank, place.local_rank, place.host, place.hosts) == (5, 1, 1, 2)
    assert (place.ranks_here, place.master) == ([4, 5, 6, 7], ("h0", 29500))
    assert place.hosted_store and place.start == "run/2"
    with pytest.raises(JobError, match="torchrun"):
        Place.of({"RANK": "0"})
    place.check(job(tmp_path, parallelism={"tp": 2, "dp": 4}))
    with pytest.raises(JobError, match="makes 2 ranks, but 8 were started"):
        place.check(job(tmp_path, parallelism={"dp": 2}))
    with pytest.raises(JobError, match="multiple of tp"):
        Place(0, 4, 0, 1).check(job(tmp_path, parallelism={"tp": 2, "dp": 2}))


def test_a_time_limit_needs_somewhere_to_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_job(tmp_path, small_job(tmp_path, checkpoint={"uri": "", "interval_steps": 0}))
    assert command.main([str(path), "--time-limit", "90m"]) == command.USAGE
    assert "refused: checkpoint.uri" in capsys.readouterr().err
    options = command.parser().parse_args([str(path), "--time-limit", "1.5h"])
    assert options.time_limit == 5400.0
    for text in ("0", "soon", "-5"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
            command._seconds(text)


def test_ctrl_c_before_the_first_step_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "HostServices", interrupted)
    path = write_job(tmp_path, small_job(tmp_path))
    assert command.main([str(path), "--run-folder", str(tmp_path)]) == command.INTERRUPTED
    assert capsys.readouterr().err == "ended by Ctrl-C before the first step\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_per_step_a_bar_on_a_terminal_and_json() -> None:
    plain, terminal, lines = io.StringIO(), Terminal(), io.StringIO()
    Display(plain, 4).step(RECORD)
    assert plain.getvalue() == (
        "step 3/4  loss 2.5000  12.3k tokens/s  MFU 41.2% (43.0% full)  memory 3.00 GiB  "
        "data 0.4 ms  step time 250 ms\n"
    )
    bar = Display(terminal, 4)
    bar.step(RECORD)
    bar.note("saves and ends: SIGTERM")
    bar.step({**RECORD, "step": 4})
    shown = terminal.getvalue()
    assert (
        "[###############.....] left 0:00  step 3/4  loss 2.5000" in shown
        and shown.count("\n") == 2
    )
    assert shown.endswith("\n")
    Display(lines, 4, as_json=True).step(RECORD)
    assert json.loads(lines.getvalue()) == {"event": "step", **RECORD}
    Display(None, 4).step(RECORD)
    assert [duration(value) for value in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


def test_json_has_no_nan_and_a_skipped_step_is_shown_by_its_cause() -> None:
    nan = float("nan")
    empty = {**RECORD, "loss": nan, "gradient_norm": nan, "skipped_because": "no_targets"}
    lines, plain = io.StringIO(), io.StringIO()
    for output, as_json in ((lines, True), (plain, False)):
        display = Display(output, 4, as_json=as_json)
        display.step({**empty, "evaluation_loss": float("inf")})
        display.step({**RECORD, "skipped_because": "norm"})
        display.step({**RECORD, "skipped_because": ""})
        assert display.skipped == 2

    def refuse(word: str) -> None:
        raise ValueError(word)

    first, *_ = (json.loads(line, parse_constant=refuse) for line in lines.getvalue().splitlines())
    assert (first["loss"], first["evaluation_loss"]) == (None, None)
    assert first["skipped_because"] == "no_targets"
    shown = plain.getvalue()
    assert "step 3 changed nothing: no target in its batch has a loss weight" in shown
    assert "above trainer.optimizer.skip_norm (2 so far)" in shown
    assert "step 3/4  no loss" in shown and "held-out loss" not in shown


def test_a_name_of_rank_0s_host_that_does_not_resolve_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place.of({**TORCHRUN, "MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(MeetingFailed, match=r"MASTER_ADDR: .*no-such-host.* --local-addr"):
        Meeting(place)
    asked = threading.Event()
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_: asked.wait())
    monkeypatch.setattr(meeting, "RESOLVE_TIMEOUT_S", 0.1)
    with pytest.raises(MeetingFailed, match="was not resolved within"):
        Meeting(place)
    asked.set()


def test_a_run_that_was_superseded_is_not_started_again(tmp_path: Path) -> None:
    """As torchrun does it, whose store outlives its processes."""
    with socket.create_server((LOOPBACK, 0)) as free:
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    del (variables := {**TORCHRUN, **alone})["TORCHELASTIC_USE_AGENT_STORE"]
    first = Meeting(Place.of(variables))  # serves the store
    first.refuse_ended()
    first.end_for_good("attempt 1 is superseded")
    hosted = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    with pytest.raises(MeetingFailed, match="attempt 1 is superseded"):
        Meeting(Place.of({**variables, **hosted})).refuse_ended()
    other = Meeting(Place.of({**variables, **hosted, "TORCHELASTIC_RUN_ID": "another"}))
    other.refuse_ended()


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader has gone")


def test_an_output_that_is_gone_costs_no_step() -> None:
    display = Display(Gone(), 4)
    display.step(RECORD)
    display.step(RECORD)
    assert display._output is None


def test_rank_0_listens_where_other_hosts_reach_it() -> None:
    assert own_address(Place()) == LOOPBACK
    two = {"rank": 0, "world_size": 2, "local_rank": 0, "local_world_size": 1, "host": 0}
    assert own_address(Place(**two, master=("127.0.0.2", 29500))).startswith("127.")
    with pytest.raises(JobError, match=r"MASTER_ADDR: .* --local-addr"):
        own_address(Place(**two, master=("no host", 29500)))


def test_hosts_without_a_common_loopback_are_refused_what_listens_there() -> None:
    opened = {"store": ["127.0.1.1", 5], "committer_endpoint": ""}
    with pytest.raises(ServiceFailed, match=r"MASTER_ADDR: .* --local-addr") as refused:
        _refuse_unreachable(opened)
    assert refused.value.final
    opened = {"store": ["10.0.0.1", 5], "committer_endpoint": "[::1]:7"}
    with pytest.raises(ServiceFailed, match=r"checkpoint\.uri: .* --insecure-network"):
        _refuse_unreachable(opened)
    for reached in ("", "10.0.0.1:7", "[fd00::1]:7"):
        _refuse_unreachable({**opened, "committer_endpoint": reached})


def test_a_daemon_listens_beyond_loopback_only_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 32 + "\n")
    words = {
        "cluster": "c",
        "node": "n",
        "incarnation": "1",
        "run-folder": tmp_path,
        "socket": tmp_path / "s",
        "token-file": tmp_path / "token",
        "address-file": tmp_path / "address",
        "host": "0.0.0.0",
    }
    (tmp_path / "token").chmod(0o600)
    command = [sys.executable, "-m", "megascale_checkpoint"]
    command += [word for name, value in words.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "refusing to listen on 0.0.0.0 without TLS" in done.stderr
    assert not (tmp_path / "address").exists()


class Daemon:
    """What a local agent asks of the services of its host."""

    def __init__(self, **answer: Any) -> None:
        values = {"kind": "saves", "committed_step": 4, "failures": [], "newest_attempt": 0}
        self.answer = Accepted("a run by hand", Saves).read(values | answer)

    def saves(self, attempt: int, *, look: bool = False) -> Any:
        return self.answer

    def daemon_problem(self) -> str:
        return ""

    def problem(self) -> str:
        return ""


def local_agent(daemon: Any) -> tuple[LocalAgent, socket.socket, io.StringIO, list[str]]:
    """One of a run of one rank, the worker's end of its socket, what it shows, why it gave up."""
    ours, theirs = socket.socketpair()
    shown, given_up = io.StringIO(), list[str]()
    display = Display(shown, 12, as_json=True)
    agent = LocalAgent(
        ours,
        0,
        Meeting(Place()),
        Outlets(display=display, report=display.event, give_up=given_up.append),
        Watched(services=daemon, saves=SaveWatch(daemon, 1, looks=True)),
    )
    return agent, theirs, shown, given_up


def test_each_failed_save_is_shown_once_and_a_later_attempt_ends_the_run() -> None:
    failed = [{"step": 8, "rank": rank, "error": "No space left"} for rank in (1, 0)]
    agent, _, shown, given_up = local_agent(Daemon(failures=failed))
    assert agent._saves is not None
    for _ in range(3):
        assert agent._saves.ask(look=True)
    agent._show_saves()
    assert (agent.failed_saves, given_up) == ([8], [])
    (line,) = map(json.loads, shown.getvalue().splitlines())
    assert (line["event"], line["failed_step"], line["rank"]) == ("save_failed", 8, 1)
    agent._saves._services = Daemon(newest_attempt=2)  # type: ignore[assignment]
    agent._saves.ask(look=True)
    agent._show_saves()
    (why,) = given_up
    assert "attempt 1 is superseded: attempt 2" in why and "checkpoint is of step 4" in why
    with pytest.raises(MeetingFailed, match="superseded"):
        agent._meeting.refuse_ended()


def test_an_order_to_save_that_failed_is_shown_and_may_be_given_again() -> None:
    agent, theirs, shown, _ = local_agent(Daemon())
    agent.start()
    ids = []
    for _ in range(2):
        agent.leave("SIGTERM")
        message, _ = framing.receive(theirs) or ({}, [])
        ids.append(message["id"])
        framing.send(theirs, {"kind": "not_left", "id": ids[-1], "problem": "disk full"})
        until(lambda: shown.getvalue().count("disk full") == len(ids), "it is shown")
    theirs.close()
    agent.join()
    assert len(set(ids)) == 2
    assert shown.getvalue().count('"event": "not_left"') == 2


def test_a_daemon_that_ends_is_started_again_a_few_times_and_each_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_services, "MOST_RESTARTS", 2)
    services = HostServices(job(tmp_path), tmp_path / "run", 0)
    monkeypatch.setattr(
        HostServices, "_start_daemon", lambda ours: ours._spawn("daemon", ["no_such"], "checkpoint")
    )
    services._start_daemon()
    reported: list[str] = []
    while "nothing is saved" not in (reported or [""])[-1]:
        services._children["checkpoint"].process.wait()
        reported.append(services.daemon_problem())
    assert [text.partition("; ")[2][:9] for text in reported] == [
        "it is sta",
        "it is sta",
        "it ended ",
    ]
    assert all("No module named no_such" in text for text in reported)
    assert services.daemon_problem() == ""
    services.stop()
