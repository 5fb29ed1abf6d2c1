"""Settings of NCCL and network cards for a cluster, each with its reason. Pure tables.

Defaults and the releases that changed them are from NCCL's documentation and source
(github.com/NVIDIA/nccl, docs/userguide/source/env.rst and src/, 2.30.7); adaptive retransmission is
from NVIDIA's "Adaptive Retransmission: Parameters Control". MegaScale (section 3.6) tunes NCCL's
timer and retry count so that a link that flaps for seconds does not end a job, and makes cards
retransmit at shorter intervals. The paper gives no values; the values here are computed.

:func:`parse` reads the description of a site's network from the text of a file:

    {"nccl": "2.27", "nics": ["mlx5_0", "mlx5_1"], "fabric": "roce", "qps": 4,
     "split_ports": false, "traffic_class": 106, "gid_index": 3, "flap_s": 10}

The keys are the options of `megascale net render`; only ``nccl`` and ``nics`` are required. Each
job sets its own watchdog, and an option of the driver its limit, so the file has neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Version = tuple[int, int]
Fabric = Literal["roce", "infiniband"]
FABRICS: Final[tuple[Fabric, ...]] = get_args(Fabric)

TICK_S: Final = 4.096e-6  # InfiniBand's unit of local ack timeouts, which double with each step
RETRIES: Final = 7  # the most that a queue pair's three bits hold, and NCCL's default
LONGEST_TIMEOUT: Final = 22  # 120 s with 7 retries
MAX_QUEUE_PAIRS: Final = 128
FLAP_MARGIN: Final = 1.25  # the timeout over the longest flap
STAGGER_RANKS, STAGGER_RATE = 256, 7000  # NCCL's own: ranks, and messages a second


class BadProfile(ValueError):
    """A cluster without settings that fit; names the option and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What is known of a cluster.

    Args:
        nccl: major and minor release.
        cards: RDMA devices of a node, in the order of its GPUs.
        queue_pairs: of a connection; more of them spread over more equal links.
        split_ports: a card's port is one of two halves of a switch's port.
        traffic_class: of the switches' lossless class; None: the fabric has one class.
        flap_s: the longest time that a link is down and comes back.
        watchdog_s: the timeout of torch's process groups (recovery.collective_timeout_s).
        hang_floor_s: when the driver counts a step as hung at the earliest. It reads status pages,
            so its verdict names the rank and may come before the watchdog's.
    """

    nccl: Version
    cards: tuple[str, ...]
    fabric: Fabric = "roce"
    queue_pairs: int = 4
    split_ports: bool = False
    traffic_class: int | None = None
    gid_index: int | None = None
    flap_s: float = 10.0
    watchdog_s: float = 300.0
    hang_floor_s: float = 60.0

    @property
    def limit_s(self) -> float:
        """Before this NCCL has to have given up, so that a card's error is seen as one."""
        return min(self.watchdog_s, self.hang_floor_s)


@dataclass(frozen=True, slots=True)
class Setting:
    """One variable: its value, why, NCCL's default in this release, and what changed it when."""

    name: str
    value: str
    reason: str
    default: str
    history: str = ""


@dataclass(frozen=True, slots=True)
class CardSetting:
    """What a network card has to be set to, by its administrator: never changed by us."""

    name: str
    value: str
    reason: str
    query: str


def timeout_s(exponent: int, retries: int = RETRIES) -> float:
    """How long a queue pair tries: 4.096 us * 2^exponent, so many times."""
    return float(TICK_S * 2**exponent * retries)


def render(site: Site) -> list[Setting]:
    """The environment of a job's processes on this cluster.

    Raises:
        BadProfile: a value is out of range, or no timeout lies between the longest flap and the
            first of the watchdog and the driver's limit.
    """
    _check(site)
    exponent = _timeout_exponent(site)
    found = [
        Setting(
            "NCCL_IB_HCA",
            "=" + ",".join(site.cards),
            "these cards and no other; without = the name mlx5_1 would match mlx5_10 as well",
            "all cards",
        ),
        Setting(
            "NCCL_IB_TIMEOUT",
            str(exponent),
            f"with the retries {timeout_s(exponent):.1f} s: longer than a flap of "
            f"{site.flap_s:g} s, shorter than {site.limit_s:g} s, when the job would be ended",
            str(_default_timeout(site.nccl)),
            "14 before 2.14, 18 from 2.14 on, 20 from 2.23 on",
        ),
        Setting(
            "NCCL_IB_RETRY_CNT",
            str(RETRIES),
            "the most that a queue pair can; the timeout is counted with it",
            "7",
        ),
        *_spreading(site),
        *_classes(site),
    ]
    if site.nccl >= (2, 23):
        found += _staggering()
        found.append(
            Setting(
                "NCCL_IB_RETURN_ASYNC_EVENTS",
                "1",
                "a card that has failed ends its communicators at once, and not by a timeout",
                "1",
                "new in 2.23",
            )
        )
    if site.nccl >= (2, 24):
        found.append(
            Setting(
                "NCCL_RAS_ENABLE",
                "1",
                "a running job can be asked which ranks are missing (ncclras)",
                "1",
                "new in 2.24",
            )
        )
    return found


def card_settings(site: Site) -> list[CardSetting]:
    """What to ask of the cards themselves."""
    if site.fabric != "roce":
        return []
    return [
        CardSetting(
            "roce_adp_retrans_en",
            "1",
            "lost packets are sent again after a short and growing time, so a flap of a second "
            "costs a second; firmware from April 2025 on has several ranges",
            f"mlxreg -d {card} --yes --reg_name ROCE_ACCL --get",
        )
        for card in site.cards
    ]


def differences(wanted: Sequence[Setting], found: Mapping[str, str]) -> list[tuple[Setting, str]]:
    """Settings that an environment lacks or has otherwise, with what it has ("": unset).

    An unset variable whose default is the wanted value is no difference.
    """
    return [
        (setting, found.get(setting.name, ""))
        for setting in wanted
        if found.get(setting.name, setting.default) != setting.value
    ]


def _check(site: Site) -> None:
    if not site.cards or not all(site.cards):
        raise BadProfile("--nics: name the RDMA cards of a node, as in mlx5_0,mlx5_1")
    if site.nccl < (2, 14):
        raise BadProfile(f"--nccl {site.nccl[0]}.{site.nccl[1]}: releases from 2.14 on are known")
    if not 1 <= site.queue_pairs <= MAX_QUEUE_PAIRS:
        raise BadProfile(f"--qps {site.queue_pairs}: give 1 to {MAX_QUEUE_PAIRS}")
    if site.traffic_class is not None and not 0 <= site.traffic_class <= 255:
        raise BadProfile(f"--traffic-class {site.traffic_class}: give 0 to 255")
    for option, value in (
        ("--flap-s", site.flap_s),
        ("--watchdog-s", site.watchdog_s),
        ("--hang-floor-s", site.hang_floor_s),
    ):
        if not 0 < value < math.inf:
            raise BadProfile(f"{option} {value:g}: give a positive number of seconds")


def _timeout_exponent(site: Site) -> int:
    for exponent in range(LONGEST_TIMEOUT + 1):
        if timeout_s(exponent) > FLAP_MARGIN * site.flap_s:
            if timeout_s(exponent) < site.limit_s:
                return exponent
            first = site.limit_s == site.watchdog_s
            option = "--watchdog-s" if first else "--hang-floor-s"
            who = "the watchdog" if first else "the driver"
            raise BadProfile(
                f"{option} {site.limit_s:g}: to outlast a flap of {site.flap_s:g} s NCCL has to "
                f"try for {timeout_s(exponent):.1f} s, and {who} would end the job first; raise it"
            )
    raise BadProfile(
        f"--flap-s {site.flap_s:g}: NCCL tries for {timeout_s(LONGEST_TIMEOUT):.0f} s at most; "
        "links that are down for longer are to be repaired, not waited for"
    )


def _default_timeout(nccl: Version) -> int:
    return 20 if nccl >= (2, 23) else 18


def _spreading(site: Site) -> list[Setting]:
    split = "1" if (2, 18) <= site.nccl < (2, 20) else "0"
    found = [
        Setting(
            "NCCL_IB_QPS_PER_CONNECTION",
            str(site.queue_pairs),
            "flows with ports of their own: switches hash them to more of their equal links",
            "1",
        ),
        Setting(
            "NCCL_IB_SPLIT_DATA_ON_QPS",
            "0",
            "whole messages in turn over the queue pairs, so small ones are not cut",
            split,
            "1 in 2.18 and 2.19, 0 from 2.20 on",
        ),
        Setting(
            "NCCL_CROSS_NIC",
            "0",
            "rings stay on their rail, where a packet passes one switch",
            "2",
        ),
    ]
    if site.split_ports and site.nccl >= (2, 30):
        found.append(
            Setting(
                "NCCL_IB_MERGE_NICS",
                "1",
                "the two halves of a port are one device with a connection over both",
                "1",
            )
        )
    return found


def _staggering() -> list[Setting]:
    """How the ranks of a large communicator come to its root when it is created."""
    return [
        Setting(
            "NCCL_UID_STAGGER_THRESHOLD",
            str(STAGGER_RANKS),
            "in communicators of more ranks for each unique id they come to its root one after the "
            "other: all at once would overflow its queue of connections",
            str(STAGGER_RANKS),
            "new in 2.23",
        ),
        Setting(
            "NCCL_UID_STAGGER_RATE",
            str(STAGGER_RATE),
            f"so many a second: 12,288 ranks in {12_288 / STAGGER_RATE:.1f} s at most",
            str(STAGGER_RATE),
            "new in 2.23",
        ),
    ]


def _classes(site: Site) -> list[Setting]:
    found = []
    if site.traffic_class is not None:
        value = str(site.traffic_class)
        found.append(
            Setting("NCCL_IB_TC", value, "the class that the switches keep lossless and mark", "0")
        )
        if site.nccl >= (2, 22):
            found.append(
                Setting(
                    "NCCL_IB_FIFO_TC",
                    value,
                    "control messages in the same class, so no other class overtakes them",
                    value,
                    "new in 2.22; the default is NCCL_IB_TC",
                )
            )
    if site.fabric == "roce":
        index = "-1" if site.gid_index is None else str(site.gid_index)
        chosen = "NCCL chooses the address" if site.gid_index is None else "the site's address"
        found += [
            Setting("NCCL_IB_GID_INDEX", index, f"{chosen} of RoCE version 2 over IPv4", "-1"),
            Setting("NCCL_IB_ROCE_VERSION_NUM", "2", "routed, unlike version 1", "2"),
            Setting(
                "NCCL_IB_ADAPTIVE_ROUTING",
                "0",
                "packets of a flow stay in order unless the switches are set up for more",
                "0",
            ),
        ]
    return found


MAX_CARDS = 64  # of a node; one for each of its devices, and some beside
_KINDS: dict[str, tuple[type, ...]] = {
    "nccl": (str,),
    "nics": (list,),
    "fabric": (str,),
    "qps": (int,),
    "split_ports": (bool,),
    "traffic_class": (int,),
    "gid_index": (int,),
    "flap_s": (int, float),
}


def parse(text: str, *, watchdog_s: float = 300.0, hang_floor_s: float = 60.0) -> Site:
    """The site that the file describes.

    Raises:
        BadProfile: it is no such JSON, or its values fit no cluster; names the key and the remedy.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadProfile(f"no JSON: {error}; give one object, as in docs/network.md") from None
    if not isinstance(values, dict):
        raise BadProfile("give one JSON object, as in docs/network.md")
    _check_keys(values)
    site = Site(
        nccl=version(values["nccl"]),
        cards=tuple(values["nics"]),
        fabric=fabric_named(values.get("fabric", "roce")),
        queue_pairs=values.get("qps", 4),
        split_ports=values.get("split_ports", False),
        traffic_class=values.get("traffic_class"),
        gid_index=values.get("gid_index"),
        flap_s=float(values.get("flap_s", 10.0)),
        watchdog_s=watchdog_s,
        hang_floor_s=hang_floor_s,
    )
    render(site)
    return site


def version(text: str) -> Version:
    """Major and minor release, from a text such as 2.27 or 2.27.5.

    Raises:
        BadProfile: it is none.
    """
    major, dot, rest = text.partition(".")
    minor = rest.partition(".")[0]
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise BadProfile(f"nccl {text!r}: give a release as in 2.27")
    return int(major), int(minor)


def fabric_named(name: str) -> Fabric:
    """The fabric of that name.

    Raises:
        BadProfile: there is none.
    """
    found: Fabric | None = next((each for each in FABRICS if each == name), None)
    if found is None:
        raise BadProfile(f"fabric {name!r}: give {' or '.join(FABRICS)}")
    return found


def _check_keys(values: dict[str, Any]) -> None:
    for key, value in values.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise BadProfile(f"{key}: there is no such key; there are {', '.join(_KINDS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise BadProfile(f"{key}: {value!r} is no {' or '.join(k.__name__ for k in kinds)}")
    for key in ("nccl", "nics"):
        if key not in values:
            raise BadProfile(f"{key}: it is missing, and has no default")
    cards = values["nics"]
    if len(cards) > MAX_CARDS or not all(isinstance(card, str) and card for card in cards):
        raise BadProfile(f"nics: give at most {MAX_CARDS} names of RDMA devices, as in mlx5_0")
