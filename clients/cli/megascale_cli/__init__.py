"""The command line of megascale: a thin layer over the Python client.

Services and other packages add commands through the entry-point group ``megascale.commands``.
"""
