"""The command line of megascale: a thin layer over the client; services add their own commands by
entry points.
"""
