"""Pure analysis of spans: the table that every analyser takes, ratios by rank, slow nodes."""
