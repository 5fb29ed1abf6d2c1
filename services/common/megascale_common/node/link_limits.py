"""Times of the link between a node and its driver on which both sides have to agree.

A fleet that lost its driver dials the next one at once. That takes ten thousand nodes in within
half a minute, if none of them gives up and dials anew meanwhile, which costs a driver as much as to
take it in. So nodes wait for longer than that takes, a driver that is about to lead keeps them
waiting instead of refusing them, and one that refuses says when to dial again.

An upper bound is what a node loses at a driver whose process lives and whose loop hangs: it has
waited 30 s for an acknowledgement before, then waits here, and must be with the next driver before
that takes it for dead, 60 s after its start, which is no earlier than 25 s after the loop hung
(15 s without a tick, 10 s of the lease). A process that is stopped or cut off answers no
connection, and costs the 5 s that one attempt to connect takes.
"""

from __future__ import annotations

HELLO_S = 30.0  # that a node waits for its driver's hello, once the connection stands
BEGINNING_S = 20.0  # for which a driver that reads the state keeps a node waiting
DIALS_PER_S = 1000.0  # of refused nodes, for which a driver names times; it takes in as many
MAX_RETRY_S = 10.0  # no node is asked to wait for longer before it dials again
