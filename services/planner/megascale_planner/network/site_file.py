"""What is known of a site's network, from a file; pure.

    {"nccl": "2.27", "nics": ["mlx5_0", "mlx5_1"], "fabric": "roce", "qps": 4,
     "split_ports": false, "traffic_class": 106, "gid_index": 3, "flap_s": 10}

The keys are the options of `megascale net render`; only ``nccl`` and ``nics`` are required. The
watchdog is each job's own, and the limit of the driver its option.
"""

from __future__ import annotations

import json
from typing import Any

from megascale_planner.network.profile import FABRICS, BadProfile, Fabric, Site, Version, render

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
