"""The largest magnitude of a tensor (its amax), found by the kernels that make the tensor.

A cast under current scaling needs the amax first; a pass of its own would read the tensor once
more. So the maker notes it on the tensor, and the cast reads the note: see Note [Noted amax].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Note [Noted amax]
# ~~~~~~~~~~~~~~~~~
# Programs compare magnitudes as integers: the bits of non-negative floats have the order of their
# values, infinity above all numbers and NaN above infinity, so that a broken value is never lost.
# They join their results by an atomic maximum. Unlike a sum, it does not depend on their order.
#
# The note holds the slot and the tensor's version. Autograd passes a gradient from the node that
# makes it to the one that reads it as the same object, so the note arrives with it. If autograd had
# to add several gradients into one, the result is another object, or its version has changed, as
# after any other write: then the note does not count, and the cast reads the tensor.
#
# Slots are handed out zeroed and are used once: zeroing each would cost a launch per tensor.

_SLOTS = 1024  # slots that one launch makes
_free: dict[torch.device, list[torch.Tensor]] = {}


def amax_slot(device: torch.device) -> torch.Tensor:
    """int32 [1], zero, for :func:`raise_amax` on the current stream."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The graph zeroes it itself: each replay must find zero again.
        return torch.zeros(1, dtype=torch.int32, device=device)
    slots = _free.setdefault(device, [])
    if not slots:
        slots.extend(torch.zeros(_SLOTS, 1, dtype=torch.int32, device=device).unbind())
    return slots.pop()


def note_amax(x: torch.Tensor, slot: torch.Tensor) -> None:
    """Note that ``slot`` holds the largest magnitude of ``x``, as it is now."""
    x._noted_amax = slot.view(torch.float32), x._version  # type: ignore[attr-defined]


def noted_amax(x: torch.Tensor) -> torch.Tensor | None:
    """The noted magnitude, float32 [1]; None: there is no note, or ``x`` was written since."""
    found, version = getattr(x, "_noted_amax", (None, -1))
    return found if version == x._version else None


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """The bits of |x|, float32, as an integer: ordered like the values, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def higher(largest: tl.tensor, written: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Magnitudes as integers: the larger of ``largest`` and what was ``written`` ``inside``."""
    return tl.maximum(largest, tl.where(inside, magnitude(written.to(tl.float32)), 0))


@triton.jit
def raise_amax(slot: tl.tensor, found: tl.tensor) -> None:
    """``slot`` = max(slot, all of ``found``), magnitudes as integers."""
    # One axis left: a block of any shape.
    tl.atomic_max(slot, tl.max(tl.ravel(found), axis=0), sem="relaxed")
