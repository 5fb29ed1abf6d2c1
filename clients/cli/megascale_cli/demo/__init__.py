"""`megascale demo`: a run that loses a node, recovers by itself, and is compared with its
uninterrupted twin.
"""
