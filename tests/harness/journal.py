"""The journal on a real etcd: states to store, a count of what is sent and read, and crashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.harness.simulated_cluster import demo_job

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.election import Leadership, campaign
from megascale_common.etcd.operations import Compare, KeyValue, Listing, Operation, Page, TxnResult
from megascale_driver.core.values.attempt import Attempt, Fault, FaultKind, NodeSlot, ReplicaOrders
from megascale_driver.core.values.cluster import (
    Breaker,
    Cluster,
    Device,
    Disposition,
    Identity,
    Node,
)
from megascale_driver.core.values.events import Audit, Evidence
from megascale_driver.core.values.job import AttemptRecord, Job, JobPhase
from megascale_driver.journal.store import LEADER_KEY, Store

TTL_S = 60
DEADLINE_S = 30.0


class Crash(Exception):
    """The leader ended here."""


class WatchedEtcd(EtcdClient):
    """A client that counts; before transaction number ``crash_at`` the leader ends.

    With ``reply_lost`` the transaction is applied first.
    """

    crash_at = 0
    reply_lost = False
    txns = 0
    largest_request_bytes = 0
    read_keys = 0

    async def txn(
        self,
        *,
        compare: Sequence[Compare] = (),
        success: Sequence[Operation] = (),
        failure: Sequence[Operation] = (),
    ) -> TxnResult:
        """Count, and crash where ordered to."""
        self.txns += 1
        request = self.keys.txn_request(compare, success, failure)
        self.largest_request_bytes = max(self.largest_request_bytes, request.ByteSize())
        if self.txns == self.crash_at and not self.reply_lost:
            raise Crash
        result = await super().txn(compare=compare, success=success, failure=failure)
        if self.txns == self.crash_at:
            raise Crash
        return result

    async def get(self, key: str) -> KeyValue | None:
        """Count one key."""
        self.read_keys += 1
        return await super().get(key)

    async def get_range(self, start: str, end: str, *, limit: int = 0, revision: int = 0) -> Page:
        """Count the keys of the page."""
        page = await super().get_range(start, end, limit=limit, revision=revision)
        self.read_keys += len(page.items)
        return page

    async def get_prefix(self, prefix: str, *, page_keys: int = 512) -> Listing:
        """Count the keys."""
        listing = await super().get_prefix(prefix, page_keys=page_keys)
        self.read_keys += len(listing.items)
        return listing


async def elected(etcd: EtcdClient) -> Leadership:
    """The next leader, whoever led before."""
    await etcd.delete(LEADER_KEY)
    return await campaign(etcd, LEADER_KEY, b"{}", ttl_s=TTL_S)


async def leader(etcd: EtcdClient) -> tuple[Store, Cluster, tuple[Audit, ...]]:
    """The next leader's store, with what it has read."""
    store = Store(etcd, await elected(etcd))
    loaded = await store.load()
    return store, loaded.cluster, loaded.audit


def nodes(count: int) -> dict[str, Node]:
    """Nodes of eight GPUs."""
    return {name: node(name) for name in names(count)}


def names(count: int) -> list[str]:
    """Names of nodes."""
    return [f"n{i:05d}" for i in range(count)]


def node(name: str) -> Node:
    """A node of eight GPUs, as its agent describes it."""
    devices = tuple(
        Device(i, "cuda", f"GPU-{name}-5c1d-4a1b-9d0e-0123456789{i:02d}", "NVIDIA H200", 150 << 30)
        for i in range(8)
    )
    identity = Identity(
        incarnation=f"{name}-abcdef123456",
        boot_id="0f3c1b9e-1111-2222-3333-444455556666",
        hostname=f"host-{name}.cluster.example",
        build="0.4.0",
        devices=devices,
        topology={"switch": f"s{int(name[1:]) // 32}", "pod": f"p{int(name[1:]) // 512}"},
        executor_endpoint="10.100.100.100:70001",
        checkpoint_endpoint="10.100.100.100:70002",
        folder="/var/lib/megascale/runs/current",
        file_view="0f3c1b9e-1111-2222-3333-444455556666/4026531841/64512-2",
    )
    return Node(name, identity)


def placed(name: str, count: int) -> Job:
    """A job that runs on ``count`` nodes of eight ranks."""
    slots = tuple(
        NodeSlot(n, tuple(range(8 * i, 8 * i + 8)), tuple(range(8)), f"{n}-abcdef123456")
        for i, n in enumerate(names(count))
    )
    all_names = names(count)
    orders = ReplicaOrders(
        peers={n: all_names[i - 1] for i, n in enumerate(all_names)},
        targets=dict.fromkeys(all_names, "10.100.100.100:70003"),
    )
    config = demo_job(name, dp=2 * count)
    attempt = Attempt(number=1, slots=slots, store_endpoint="10.1.1.1:1", replica_orders=orders)
    record = AttemptRecord(1, slots, 1.0)
    return Job(name, config, phase=JobPhase.RUNNING, current=attempt, attempts=(record,))


ERROR = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
    '"10.100.100.100": all_gather_into_tensor timed out, the log of the rank has the stacks. '
) * 4


def all_failed(job: Job) -> tuple[Job, tuple[Audit, ...], Breaker, dict[str, Node]]:
    """Every node of a job fails at once: two faults, two lines, a quarantine for each."""
    faults: list[Fault] = []
    lines: list[Audit] = []
    own = job.log_seq
    for number, slot in enumerate(job.slots):
        message = f"rank {slot.ranks[0]} on node {slot.node} ended with status 1: {ERROR[:600]}"
        faults.append(
            Fault(FaultKind.WORKER_SYMPTOM, slot.node, 1e9 + number, message, slot.ranks[0])
        )
        dead = f"node {slot.node} is dead: its link broke and its port refuses connections"
        faults.append(Fault(FaultKind.NODE_DEAD, slot.node, 1e9 + number, dead))
        subject = f"nodes/{slot.node}"
        evidence = (Evidence("exit", f"{subject}/ranks/{slot.ranks[0]}", message),)
        for log, seq, reason, text in (
            (job.name, own + 1, "WORKER_EXITED", message),
            ("", number + 1, "NODE_DEAD", dead),
        ):
            lines.append(
                Audit(log, seq, 1e9, "driver", subject, reason, text, "process-exit", "ENFORCE",
                      job.attempt, evidence, "the attempt ends")
            )  # fmt: skip
        own += 1
    broken = {
        slot.node: replace(
            node(slot.node), disposition=Disposition.QUARANTINED, disposition_reason="it is dead"
        )
        for slot in job.slots
    }
    breaker = Breaker(tuple((1e9, slot.node) for slot in job.slots), 1e9)
    job = replace(
        job,
        phase=JobPhase.STOPPING,
        log_seq=own,
        current=replace(job.current, faults=tuple(faults)),
        evicted=tuple(slot.node for slot in job.slots),
        node_failures={slot.node: 1 for slot in job.slots},
    )
    return job, tuple(lines), breaker, broken
