"""Replicas: the sealed snapshots of a node, copied to the memory of a peer node.

:mod:`protocol` is what travels, :mod:`connection` one TCP connection, :mod:`streams` the several
of one transfer, :mod:`store` the memory at the peer, :mod:`server` answers, :mod:`arrival` is a
state on its way in, :mod:`sender` copies what is sealed here, and :mod:`fetch` brings a state back
into a slot. The driver chooses the peer (``megascale_driver.placement.replicas``), and the
worker's registration carries its address.
"""
