"""Replicas: copies of a node's sealed snapshots in the memory of a peer node.

``protocol`` defines the messages, ``connection`` is one TCP connection, and ``streams`` the several
connections of one transfer. ``sender`` copies sealed slots to the peer; ``server`` receives them
there and ``store`` keeps them. ``node_replicas`` brings a state back into a slot. The driver
chooses the peer (``megascale_driver.placement.replicas``); the worker's registration carries its
address.
"""
