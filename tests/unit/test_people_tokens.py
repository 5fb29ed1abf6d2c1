"""People by token: the file, what of it counts when it changes, and how many calls a peer gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_common.service.errors import LimitError, OptionError, UnauthenticatedError
from megascale_common.service.identity import gate
from megascale_common.service.identity.gate import CallRate
from megascale_common.service.identity.peers import Peer, Role
from megascale_common.service.identity.people import (
    MAX_TOKEN_BYTES,
    PeopleFile,
    add_person,
    digest_of,
    token_of,
)

ADA = Peer(Role.OPERATOR, "ada", by_token=True)


def test_a_token_counts_until_its_person_gets_another(tmp_path: Path) -> None:
    path = tmp_path / "people"
    first = add_person(path, "ada", Role.OPERATOR)
    grace = add_person(path, "grace", Role.VIEWER)
    people = PeopleFile(path)
    assert people.find(first) == ADA
    assert first not in path.read_text(), "nobody who reads the file can call with it"
    second = add_person(path, "ada", Role.OPERATOR)
    assert (people.find(first), people.find(second)) == (None, ADA)
    path.write_text("")
    assert people.find(grace) is None


def test_a_file_that_became_unusable_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "people"
    token = add_person(path, "ada", Role.OPERATOR)
    people = PeopleFile(path)
    path.write_text("ada operator her-password\n")
    assert people.find(token) == ADA
    path.unlink()
    assert people.find(token) == ADA


@pytest.mark.parametrize(
    "line",
    [
        "ada operator",
        "ada driver " + digest_of("x"),
        "ada operator her-password",
        "Ada operator " + digest_of("x"),
        "ada operator sha256:00",
        "ada operator " + digest_of("x") + " more",
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "people"
    path.write_text(f"# who may do what\n\n{line}\n")
    with pytest.raises(OptionError, match="people:3"):
        PeopleFile(path)
    with pytest.raises(OptionError, match="people:3"):
        add_person(path, "grace", Role.VIEWER)


def test_nodes_and_drivers_have_certificates(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--role executor"):
        add_person(tmp_path / "people", "n1", Role.EXECUTOR)
    with pytest.raises(OptionError, match="--people-tokens"):
        PeopleFile(tmp_path / "absent")


@pytest.mark.parametrize(
    "value", [None, "", "Bearer ", "Basic abc", b"abc", "Bearer " + "x" * (MAX_TOKEN_BYTES + 1)]
)
def test_a_call_without_a_token_is_refused(value: str | bytes | None) -> None:
    with pytest.raises(UnauthenticatedError, match="carries no token"):
        token_of({} if value is None else {"authorization": value})
    assert token_of({"authorization": b"Bearer abc"}) == "abc"


def test_a_peer_that_calls_too_often_waits_and_the_others_do_not() -> None:
    now_s = [0.0]
    rate = CallRate(10.0, 20.0, lambda: now_s[0])
    for _ in range(20):
        rate.take("executor/n1")
    with pytest.raises(LimitError, match="executor/n1 begins more than 10 calls a second"):
        rate.take("executor/n1")
    rate.take("executor/n2")
    now_s[0] = 0.1
    rate.take("executor/n1")
    with pytest.raises(LimitError):
        rate.take("executor/n1")


def test_peers_without_end_cost_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_PEERS", 100)
    rate = CallRate()
    for number in range(1000):
        rate.take(f"viewer/v{number}")
    assert len(rate) == 100


@given(st.lists(st.floats(0.0, 2.0), max_size=200))
def test_a_peer_never_gets_more_than_rate_and_burst(pauses_s: list[float]) -> None:
    now_s, allowed = [0.0], 0
    rate = CallRate(10.0, 20.0, lambda: now_s[0])
    for pause_s in pauses_s:
        now_s[0] += pause_s
        try:
            rate.take("x")
            allowed += 1
        except LimitError:
            continue
    assert allowed <= 20 + 10 * now_s[0] + 1
