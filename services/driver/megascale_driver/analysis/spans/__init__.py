"""Analyses of spans, pure: table, slow nodes, heat map, cause of a falling MFU, timeline."""
