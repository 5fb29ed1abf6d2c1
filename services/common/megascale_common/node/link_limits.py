"""Times of the link between a node and its driver on which both sides have to agree.

Note [Reconnecting fleet]
~~~~~~~~~~~~~~~~~~~~~~~~~
A fleet that lost its driver connects to the next one at once. A driver can accept ten thousand
nodes within half a minute, provided that none gives up and connects again meanwhile, which would
cost the driver as much as accepting it. So nodes wait longer than that for the driver's hello, a
driver that is about to lead keeps them waiting instead of refusing them, and a driver that refuses
a node names the time at which to connect again.

The wait has an upper bound because of drivers whose process lives but whose loop hangs. The node
has waited 30 s for an acknowledgement before, then waits here for a hello. It must reach the next
driver before that one declares it dead, which is 60 s after its start, and it starts no earlier
than 25 s after the loop hung (15 s without a tick, 10 s of the lease). A process that is stopped or
cut off does not answer connections, and costs only the 5 s of one attempt to connect.
"""

from __future__ import annotations

HELLO_S = 30.0  # a node waits so long for its driver's hello, once it is connected
BEGINNING_S = 20.0  # a driver that still reads the state keeps a node waiting so long
DIALS_PER_S = 1000.0  # rate at which refused nodes return; a driver accepts as many
MAX_RETRY_S = 10.0  # the longest wait that a driver asks a refused node for
