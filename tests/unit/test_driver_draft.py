"""The core's working copy: what an event touches, what may change, and the names in etcd."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import POLICY, Desk, exited, job_with
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core import machine
from megascale_driver.core.values.attempt import FaultKind
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Cluster,
    Identity,
    Liveness,
    Node,
    Report,
)
from megascale_driver.core.values.events import Event, NodeHello, NodeReport, StreamReset
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.overlay import LAYER, Layers, Working, changed_keys
from megascale_driver.core.values.stored_fields import differs
from megascale_driver.journal import codec
from megascale_job.restore import RestorePlan, RestoreSource

# As a build from before `Attempt` wrote it: attempt, slots, faults and so on beside the others.
OLD_HEAD = """{
 "after_stop": "QUEUED", "attempt": 1, "best_step": 42, "committed_step": 30,
 "created_at_s": 1000.0, "committer_endpoint": "n1:2", "evicted": [],
 "log_seq": 5, "name": "a", "phase": "STOPPING",
 "faults": [{"at_s": 1001.0, "hard": true, "kind": "WORKER_EXITED", "message": "rank 5 was killed",
             "node": "n2", "rank": 5}],
 "replica_orders": {"peers": {"n1": "n2"}, "sources": [], "targets": {"n1": "n2:4"}},
 "restarts": 3, "spares": ["n3"], "spec_revision": 1, "step": 42, "store_endpoint": "h:9",
 "restore": {"manifest_uri": "m", "manifest_xxh3": "", "source": "storage", "step": 30,
             "written_by_attempt": 1},
 "slots": [{"devices": [0, 1], "incarnation": "n1-1", "node": "n1", "ranks": [0, 1]},
           {"devices": [0, 1], "incarnation": "n2-1", "node": "n2", "ranks": [2, 3]}],
 "txn": "of the transaction"
}"""


class UnreadLayers(Layers[Any]):
    """Layers that fail where they are read as a whole."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("an event of one node has read all nodes")

    def _merge(self) -> dict[str, Any]:
        raise AssertionError("an event of one node has read all nodes")


@pytest.mark.parametrize("count", [0, 3, LAYER + 1])
def test_the_length_of_layers_is_that_of_a_map(count: int) -> None:
    plain: dict[str, int] = {f"k{number}": number for number in range(count)}
    layers = Layers(dict(plain))
    for number in range(3 * LAYER):
        working = Working(layers)
        name = f"k{number // 2}"
        if number % 3 == 0 and name in plain:
            del working[name], plain[name]
        else:
            working[name] = plain[name] = number
        layers = working.frozen()
        assert len(layers) == len(plain) == len(layers.keys())


def test_a_head_of_an_older_build_is_read_as_job_and_attempt() -> None:
    job = codec.load(Job, OLD_HEAD.encode(), config=demo_job("a"))
    assert (job.attempt, job.phase, job.restarts, job.spares) == (1, JobPhase.STOPPING, 3, ("n3",))
    current = job.current
    assert [slot.node for slot in current.slots] == ["n1", "n2"] and current.step == 42
    assert [fault.kind for fault in current.faults] == [FaultKind.WORKER_EXITED]
    assert current.restore == RestorePlan(RestoreSource.STORAGE, 30, 1, "m")
    assert (current.store_endpoint, current.committer_endpoint) == ("h:9", "n1:2")
    assert current.replica_orders.of("n1", (0, 1)).target == "n2:4"


def test_a_head_of_this_build_has_the_names_that_an_older_one_reads() -> None:
    job = codec.load(Job, OLD_HEAD.encode(), config=demo_job("a"))
    written, known = json.loads(codec.dump(job)), json.loads(OLD_HEAD)
    # An older build ignores what the plan has besides.
    written["restore"] = {name: written["restore"][name] for name in known["restore"]}
    assert {name: written.get(name) for name in known if name != "txn"} == {
        name: value for name, value in known.items() if name != "txn"
    }
    assert "current" not in written and "number" not in written and "_index" not in written


def test_a_change_within_the_attempt_is_stored_and_a_step_alone_is_not() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    job = desk.job()
    assert differs(job, job_with(job, store_endpoint="h:1"))
    assert not differs(job, job_with(job, step=7))
    assert not differs(job, job_with(job, open_asked=True))


def nodes_of(count: int) -> dict[str, Node]:
    return {
        f"n{i}": Node(f"n{i}", Identity(f"n{i}-1"), liveness=Liveness.ALIVE, connected=True)
        for i in range(count)
    }


@pytest.mark.parametrize(
    "event",
    [
        NodeReport(1000.0, "n7", "n7-1", Report(phase=AttemptPhase.IDLE)),
        NodeHello(1000.0, "n7", Identity("n7-2")),
        NodeHello(1000.0, "new", Identity("new-1")),
        StreamReset(1000.0, "n7", "n7-1"),
    ],
)
def test_an_event_of_one_node_reads_no_other_node(event: Event) -> None:
    state = Cluster(nodes=UnreadLayers(nodes_of(20)))
    after, _ = machine.step(state, event, POLICY)
    assert isinstance(event, NodeReport | NodeHello | StreamReset)
    assert after.nodes[event.node] is not state.nodes.get(event.node)
    assert after.nodes["n3"] is state.nodes["n3"]
    assert changed_keys(state.nodes, after.nodes) == (event.node,)


def test_the_state_before_an_event_stays_as_it_was() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.run()
    before, shown = desk.state, repr(desk.state)
    desk.fail("n2", exited(5, 1001.0, -11))
    desk.hello("n9")
    assert repr(before) == shown and "n9" not in before.nodes and "n9" in desk.state.nodes


def test_layers_read_like_a_dict_through_changes_removals_and_merges() -> None:
    chosen = random.Random(7)
    wanted: dict[str, int] = {}
    layers: Layers[int] = Layers({})
    for number in range(3 * LAYER):
        working = Working(layers)
        for _ in range(3):
            key = str(chosen.randrange(2 * LAYER))
            if key in wanted and chosen.random() < 0.2:
                del working[key], wanted[key]
            else:
                working[key] = wanted[key] = number
        layers = working.frozen()
        probe = str(chosen.randrange(2 * LAYER))
        assert layers.get(probe) == wanted.get(probe) and (probe in layers) == (probe in wanted)
        assert len(layers) == len(wanted)
    assert dict(layers.items()) == wanted and sorted(layers) == sorted(wanted)
    assert set(layers.keys()) == set(wanted) and sorted(layers.values()) == sorted(wanted.values())


def test_a_removed_key_is_gone_and_can_return() -> None:
    working = Working({"a": 1, "b": 2})
    del working["a"]
    assert "a" not in working and working.get("a", 9) == 9 and list(working) == ["b"]
    with pytest.raises(KeyError):
        del working["a"]
    with pytest.raises(KeyError):
        working["a"]
    frozen = working.frozen()
    assert "a" not in frozen and frozen.get("a") is None and len(frozen) == 1
    with pytest.raises(KeyError):
        frozen["a"]
    again = Working(frozen)
    again["a"] = 3
    assert dict(again.frozen()) == {"a": 3, "b": 2} and dict(frozen) == {"b": 2}


def test_an_untouched_working_copy_is_the_map_before() -> None:
    layers = Layers({"a": 1})
    assert Working(layers).frozen() is layers and changed_keys(layers, layers) == ()


def test_changed_keys_are_found_also_when_one_of_two_maps_was_merged() -> None:
    first = Layers({"a": 1, "b": 2, "c": 3})
    working = Working(first)
    working["b"], working["d"] = 5, 6
    del working["c"]
    second = working.frozen()
    assert set(changed_keys(first, second)) == {"b", "d", "c"}
    assert len(second.items()) == 3  # merges it
    assert changed_keys(first, second) == ("b", "d", "c")
    assert changed_keys({"a": first}, {"a": first}) == ()


def test_changes_below_a_commit_are_all_stored() -> None:
    """What the store writes is what differs, whichever way the maps were built."""
    desk = Desk("n1", "n2", "n3")
    plain = replace(desk.state, nodes=dict(desk.state.nodes))
    desk.submit()
    assert changed_keys(plain.nodes, desk.state.nodes) == ("n1", "n2")
    assert changed_keys(plain.jobs, desk.state.jobs) == ("a",)


def test_a_map_knows_what_changed_in_the_events_before_it() -> None:
    """Without going through its layer, as every decision on a large fleet would."""
    first: Layers[int] = Layers({str(number): number for number in range(500)})
    maps = [first]
    for number in range(12):
        after = Working(maps[-1])
        after[str(number)] = -1 - number
        if number % 3 == 2:
            del after[str(100 + number)]
        maps.append(after.frozen())
    newest = maps[-1]
    assert newest.changed_since(maps[-3]) == {"10": None, "11": None, "111": None}
    assert newest.changed_since(first) is None  # too many events ago
    for old in maps:
        found = changed_keys(old, newest)
        assert set(found) == {key for key in old if old.get(key) != newest.get(key)}
    aside = Working(first)
    aside["7"] = 70
    assert set(changed_keys(aside.frozen(), maps[1])) == {"7", "0"}
