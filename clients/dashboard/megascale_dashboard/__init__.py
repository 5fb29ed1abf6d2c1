"""Pages for a browser: the fleet, jobs, nodes, events, and what is wrong now; read-only."""
