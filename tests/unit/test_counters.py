"""Counters of a host: from this one, and from synthetic trees of hosts with other hardware."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.harness.waiting import eventually

from megascale_executor.agent.link.heartbeat import host_counters
from megascale_executor.counters import nvml
from megascale_executor.counters.network import Ports, PriorityPauses, Rdma
from megascale_executor.counters.reading import NotShown, Reading
from megascale_executor.counters.sampler import (
    MAX_COUNTERS,
    FastRing,
    Sample,
    Sampler,
    read_all,
    sources,
    traffic_ring,
)

H200 = {
    "index": 0, "lost": False, "uuid": "GPU-1", "model": "NVIDIA H200", "recovery_action": 0,
    "ecc_uncorrected": 0, "ecc_uncorrected_ever": 0, "ecc_corrected": 3, "rows_corrected": 0,
    "rows_uncorrected": 0, "rows_pending": 0, "rows_failed": 0, "throttle": 0x44,
    "sm_clock_mhz": 1980, "memory_clock_mhz": 3201, "power_mw": 350000, "temperature_c": 45,
    "pcie_generation": 5, "pcie_width": 16, "pcie_width_max": 16,
}  # fmt: skip


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def value(sample: Sample, name: str, target: str = "") -> float:
    (found,) = [
        each.value for each in sample.readings if (each.name, each.target) == (name, target)
    ]
    return found


def test_this_host_shows_its_counters_and_names_what_it_does_not() -> None:
    found = read_all(sources())
    assert value(found, "host_cpu_seconds_total", "user") > 0
    assert value(found, "process_resident_bytes", "agent") > 1 << 20
    named = {reason.partition(":")[0] for reason in found.skipped}
    shown = {source.name for source in sources()} - named
    assert {"cpu", "memory", "process", "tcp"} <= shown


def test_a_host_with_rdma_ports_and_pauses(tmp_path: Path) -> None:
    net, rdma = "sys/class/net", "sys/class/infiniband/mlx5_0/ports/1"
    root = tree(tmp_path, {
        f"{net}/eth0/statistics/rx_bytes": "700\n",
        f"{net}/eth0/carrier_down_count": "3\n",
        f"{net}/old0/carrier_changes": "5\n",
        f"{net}/lo/statistics/rx_bytes": "9\n",
        f"{rdma}/counters/port_rcv_data": "1000\n",
        f"{rdma}/counters/port_xmit_data": "N/A (no PMA)\n",
        f"{rdma}/hw_counters/out_of_sequence": "4\n",
        "ethtool/eth0": "NIC statistics:\n     rx_prio3_pause: 17\n     rx_bytes: 700\n",
        "proc/diskstats": "259 0 nvme0n1 1 2 30 4 5 6 70 8 9 10 11\n259 1 nvme0n1p1" + " 1" * 11,
    })  # fmt: skip
    found = read_all(sources(root))
    assert value(found, "network_received_bytes_total", "eth0") == 700
    assert value(found, "link_flaps_total", "eth0") == 3
    assert value(found, "link_flaps_total", "old0") == 2
    assert value(found, "rdma_received_bytes_total", "mlx5_0:1") == 4000
    assert value(found, "rdma_out_of_sequence_total", "mlx5_0:1") == 4
    assert value(found, "disk_read_bytes_total", "nvme0n1") == 30 * 512
    assert not [each for each in found.readings if each.name == "rdma_sent_bytes_total"]
    assert not [each for each in found.readings if "p1" in each.target or each.target == "lo"]
    skipped = {reason.partition(":")[0] for reason in found.skipped}
    assert skipped == {"cpu", "memory", "pressure", "process", "tcp", "priority_pauses"}
    (root / "ethtool/old0").write_text("no stats available\n")
    (pauses,) = PriorityPauses(root).read()
    assert pauses == Reading("pfc_pauses_received_total", "eth0:prio3", 17)


def test_a_host_without_hardware_says_why(tmp_path: Path) -> None:
    for source in (Ports(tmp_path), Rdma(tmp_path)):
        with pytest.raises(NotShown, match="no "):
            source.read()
    found = read_all(sources(tmp_path))
    assert not found.readings and len(found.skipped) == len(sources())


def test_files_of_another_form_are_a_reason_and_the_rest_is_read(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "proc/stat": "cpu one two three four five six seven eight\n",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:\n",
        "proc/net/snmp": "Tcp: RtoMin\nTcp: 1\n",
        "proc/pressure/cpu": "some total=5000000\n",
        "proc/pressure/memory": "some total=1\n",
        "proc/pressure/io": "some total=1\n",
    })  # fmt: skip
    found = read_all(sources(root))
    assert value(found, "host_pressure_seconds_total", "cpu-some") == 5
    reasons = {reason.partition(":")[0] for reason in found.skipped}
    assert {"cpu", "memory", "tcp"} <= reasons


def test_counters_are_bounded_and_the_heartbeat_has_those_that_decide() -> None:
    class Many:
        name = "many"

        def read(self) -> list[Reading]:
            return [Reading("link_flaps_total", f"eth{number}", 1) for number in range(1000)]

    found = read_all([Many()])
    assert len(found.readings) == MAX_COUNTERS and "744 above the limit" in found.skipped[0]
    beat = host_counters(counters=Sample((*found.readings, Reading("x", "", 1)), ("rdma: none",)))
    assert len(beat.counters) == 128 and beat.counters_skipped == ["rdma: none"]
    assert {each.name for each in beat.counters} == {"link_flaps_total"}
    assert len(beat.SerializeToString()) < 8 << 10


def test_gpus_of_a_recording() -> None:
    found = Sample(tuple(nvml.readings(H200)))
    assert value(found, "gpu_sm_clock_hertz", "GPU-1") == 1.98e9
    assert value(found, "gpu_power_watts", "GPU-1") == 350
    assert value(found, "gpu_throttled", "GPU-1:hw_thermal") == 1
    assert value(found, "gpu_throttled", "GPU-1:hw_slowdown") == 0
    lost = nvml.readings({"index": 3, "lost": True})
    assert lost == [Reading("gpu_lost", "3", 1.0)]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a host without GPU")
def test_a_host_without_gpu_says_so() -> None:
    with pytest.raises(NotShown, match=r"NVML|nvidia-ml-py"):
        nvml.Gpus().read()


async def test_the_sampler_reads_again_and_a_stuck_source_holds_up_its_own_group_only(
    tmp_path: Path,
) -> None:
    stuck = threading.Event()

    class Stuck:
        name = "stuck"

        def read(self) -> list[Reading]:
            stuck.wait(30)
            return []

    port = tree(tmp_path, {"sys/class/net/eth0/statistics/rx_bytes": "1"})
    sampler = Sampler([[Stuck()], [Ports(port), Rdma(port)]], period_s=0.01)
    sampler.start()
    try:
        await eventually(lambda: sampler.newest.readings, "the first sample")
        tree(tmp_path, {"sys/class/net/eth0/statistics/rx_bytes": "2"})
        # A file that is just being written has no value for a moment.
        await eventually(
            lambda: [each.value for each in sampler.newest.readings] == [2], "the next sample"
        )
        assert sampler.newest.skipped[0].startswith("rdma: no RDMA port")
    finally:
        stuck.set()
        sampler.stop()


async def test_the_ring_keeps_the_newest_samples_of_chosen_counters(tmp_path: Path) -> None:
    root = tree(tmp_path, {
        "sys/class/net/eth0/statistics/rx_bytes": "1",
        "sys/class/net/eth0/statistics/tx_bytes": "1",
    })  # fmt: skip
    ring = FastRing(Ports(root), ["network_received_bytes_total"], 0.001, samples=8)
    ring.start()
    await eventually(lambda: len(ring.samples()) == 8, "a full ring")
    begin = ring.samples()[-1][0]
    await eventually(lambda: ring.samples()[0][0] > begin, "newer samples")
    ring.stop()
    times = [at_s for at_s, _ in ring.samples()]
    assert len(times) == 8 and times == sorted(times)
    assert {each.name for _, found in ring.samples() for each in found} == {
        "network_received_bytes_total"
    }
    assert set(ring.peaks()) == {("network_received_bytes_total", "eth0")}
    with pytest.raises(ValueError, match=r"at least 0\.001"):
        FastRing(Ports(root), [], 0.0)


def test_the_peak_is_the_greatest_rate_between_two_samples(tmp_path: Path) -> None:
    ring = traffic_ring(0.001, tmp_path)
    name = "network_received_bytes_total"
    for at_s, value_now in ((0.0, 0), (0.5, 100), (1.0, 900), (2.0, 1000)):
        ring._ring.append((at_s, (Reading(name, "eth0", value_now),)))
    assert ring.peaks() == {(name, "eth0"): 1600.0}
