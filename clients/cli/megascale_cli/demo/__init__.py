"""`megascale demo`: a run loses a node, recovers by itself, and equals an uninterrupted one."""
