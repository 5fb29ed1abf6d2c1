"""The root of a failure as a short text that is equal for equal failures on different nodes.

Numbers, addresses and the node's own name differ between two occurrences of one defect; what is
left of the message does not.
"""

from __future__ import annotations

import re

MAX_FINGERPRINT = 120  # characters

_VARIABLE = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


def fingerprint(kind: str, message: str, node: str = "") -> str:
    """Equal for failures that differ only in numbers, addresses and the node."""
    text = message.replace(node, "NODE") if node else message
    return f"{kind}: {_VARIABLE.sub('#', text)}"[:MAX_FINGERPRINT]
