"""Why bounds are as they are, for those whose constant has no comment that says it."""

from __future__ import annotations

_ERROR = "an error's text in a message; the log has the whole"
_NAMED = "names in one sentence; a sentence with more is not read"
_DEVICES = "devices of a node, far above any machine"

# By package:NAME, whichever module has it. docs.generate_limits fails for a bound that has neither
# a comment nor a line here.
REASONS = {
    "megascale_checkpoint:KEPT_DAMAGED": "damaged slots that a heartbeat names, the newest",
    "megascale_checkpoint:KEPT_JOBS": "jobs whose writing rate is remembered",
    "megascale_checkpoint:MAX_ERROR_CHARS": _ERROR,
    "megascale_checkpoint:MAX_PARTS": "of one upload, by S3",
    "megascale_checkpoint:MOST_BREAKS": (
        "broken connections of one transfer; then it fails, and the next snapshot tries"
    ),
    "megascale_checkpoint:MOST_DRAIN_S": "longest that a worker may ask for to drain",
    "megascale_checkpoint:MOST_IN_FLIGHT": (
        "snapshots of a rank under way; more means that its store is too slow"
    ),
    "megascale_checkpoint:MOST_LOCAL_RANKS": _DEVICES,
    "megascale_cli:MAX_LINES": "what the service gives at once",
    "megascale_cli:MAX_STEPS": "the demo is to end within two minutes",
    "megascale_job:MAX_FILE_BYTES": "a job file has a few KiB",
    "megascale_client:MAX_MESSAGE_BYTES": "the same limit as on the server's side",
    "megascale_common:BURST_CALLS": (
        "the same at once: a page of lists, or a node's start, needs tens"
    ),
    "megascale_common:CALLS_PER_S": (
        "calls that one identified caller may begin a second: a program that has gone "
        "wrong must not take a server from all others"
    ),
    "megascale_common:MAX_BYTES": "a provider's document; real ones have a few KiB",
    "megascale_common:MAX_CONNECTIONS": "scrapers at once; there are one or two",
    "megascale_common:MAX_DESCRIPTORS": "files passed with one message",
    "megascale_common:MAX_MESSAGE_BYTES": (
        "a message between processes of one node; large data is in shared memory"
    ),
    "megascale_common:MAX_NAME_CHARS": "the header has fixed fields",
    "megascale_common:MAX_OPS": "names of operations in a ring's header",
    "megascale_common:MAX_REQUEST_BYTES": "a scrape's request has some hundred",
    "megascale_common:MAX_ROWS": "groups and streams of a rank: the page is of a fixed size",
    "megascale_common:MAX_SAMPLE_CHARS": "of a line that a heartbeat shows",
    "megascale_common:MAX_TEMPLATES": (
        "kinds of unknown lines that are told apart; the rest is counted together"
    ),
    "megascale_common:MAX_WORDS": "of a line, for its template",
    "megascale_dashboard:KEPT_ANSWERS": "of the driver, shared by all who look within a second",
    "megascale_dashboard:MAX_CHECKPOINTS": "of a job that a page shows, the newest",
    "megascale_dashboard:MAX_FOLLOWED": (
        "jobs whose steps are followed; the one looked at longest ago is let go"
    ),
    "megascale_dashboard:MAX_FORM_BYTES": "the form has a token, nothing else",
    "megascale_dashboard:MAX_JOBS": "that a page shows",
    "megascale_dashboard:MAX_NODES": (
        "that a page shows, above the largest fleet that was simulated"
    ),
    "megascale_dashboard:MAX_STREAMS": (
        "open pages that are told of changes; further ones ask every few seconds"
    ),
    "megascale_driver:MAX_ACTIONS": _NAMED,
    "megascale_driver:MAX_ATTEMPT": "a stored job with more is damaged",
    "megascale_driver:MAX_BATCH_BYTES": "a larger batch of spans is refused",
    "megascale_driver:MAX_BATCH_SPANS": "32 KiB before they are compressed",
    "megascale_driver:MAX_BEHIND_S": (
        "by which deadlines of silence move at most while the driver itself is behind"
    ),
    "megascale_driver:MAX_BYTES": "half of what etcd takes in one request",
    "megascale_driver:MAX_CHECK_ROOTS": "roots looked at when a failure is explained",
    "megascale_driver:MAX_DECLINE_STEPS": "that windows of a falling MFU have",
    "megascale_driver:MAX_DETAIL": _ERROR,
    "megascale_driver:MAX_DEVICES": _DEVICES,
    "megascale_driver:MAX_EVIDENCE": "ranks whose position an event shows",
    "megascale_driver:MAX_HEARTBEAT_BYTES": (
        "a larger one is dropped, and still proves its agent alive"
    ),
    "megascale_driver:MAX_HELPERS": "idle nodes that a search for a culprit borrows",
    "megascale_driver:MAX_KEYS": (
        "checks by device model and target; the one that was measured longest ago is forgotten"
    ),
    "megascale_driver:MAX_LABELS": "of a node's topology",
    "megascale_driver:MAX_LOGS": "kinds of lines in a heartbeat",
    "megascale_driver:MAX_LOG_LINES": "of one TailLogs, as the node has it",
    "megascale_driver:MAX_MARKS": "open spans of one job's account",
    "megascale_driver:MAX_NAME": "characters of a name in a heartbeat; the rest is cut",
    "megascale_driver:MAX_NAMED": _NAMED,
    "megascale_driver:MAX_NAMES": "operations that a heat map is asked for",
    "megascale_driver:MAX_NAME_CHARS": (
        "of a counter's name, and its target; a batch with a longer one is dropped"
    ),
    "megascale_driver:MAX_NODES": "nodes with figures, above the largest fleet that was simulated",
    "megascale_driver:MAX_OFFSET_DIGITS": "of a resume position, which clients send",
    "megascale_driver:MAX_OPERATIONS": "of one rank in a heartbeat",
    "megascale_driver:MAX_PAGE": "entries of one answer; further pages have the rest",
    "megascale_driver:MAX_PROBLEM": _ERROR,
    "megascale_driver:MAX_PROGRESS": (
        "reports of progress that wait for the core; a newer one replaces the one before"
    ),
    "megascale_driver:MAX_REASON": "characters of a person's reason in the audit log",
    "megascale_driver:MAX_REQUEST_ID": "characters; it is stored for a day",
    "megascale_driver:MAX_ROLLBACKS": "of one job; more is no divergence but a wrong job",
    "megascale_driver:MAX_SAMPLE": "characters of a line in a heartbeat",
    "megascale_driver:MAX_STEPS": "that a heat map reads, in the store's one thread",
    "megascale_driver:MAX_STEP_TIMES": "step times for a job's typical one",
    "megascale_driver:MAX_SUGGESTIONS": _NAMED,
    "megascale_driver:MAX_TEXT": _ERROR,
    "megascale_driver:MAX_TIMELINE_STEPS": "of a trace; viewers slow down beyond",
    "megascale_driver:MAX_TOKEN_DIGITS": "of a position in a page token, which clients send",
    "megascale_driver:MAX_TRACES": "of one profile",
    "megascale_driver:MAX_WAITING_BYTES": (
        "spans that wait for the store's thread; the newest are dropped and counted"
    ),
    "megascale_executor:MAX_BYTES": "more is no job's code but a folder of data",
    "megascale_executor:MAX_CHARS": "of a stack that a heartbeat carries",
    "megascale_executor:MAX_COUNTERS": "of a node; further ones are left out",
    "megascale_executor:MAX_DETAIL_CHARS": "of a check's result",
    "megascale_executor:MAX_DEVICES": _DEVICES,
    "megascale_executor:MAX_ERROR_CHARS": _ERROR,
    "megascale_executor:MAX_FAST_COUNTERS_MS": "the other sampling has every second",
    "megascale_executor:MAX_FILES": "more is no job's code but a folder of data",
    "megascale_executor:MAX_FINGERPRINTS": "kinds of lines in a heartbeat",
    "megascale_executor:MAX_FRAMES": "innermost ones, which say where a rank was",
    "megascale_executor:MAX_HEARTBEAT_BYTES": (
        "what the driver takes; a longer one is shortened, least important content first"
    ),
    "megascale_executor:MAX_IN_HEARTBEAT": "a heartbeat has to stay below 64 KiB",
    "megascale_executor:MAX_KIND_CHARS": "characters of an exception's name",
    "megascale_executor:MAX_LINES": "of one TailWorkerLogs; ask for less at once",
    "megascale_executor:MAX_LINE_CHARS": "of a line in an answer; the rest is cut",
    "megascale_executor:MAX_OPERATIONS": "of one rank in a heartbeat",
    "megascale_executor:MAX_OUTPUT_BYTES": "that a test's process may print",
    "megascale_executor:MAX_PACKET": "an IP packet has no more",
    "megascale_executor:MAX_PEERS": "hosts that one check pings",
    "megascale_executor:MAX_REASON_CHARS": "a heartbeat has to stay below 64 KiB",
    "megascale_executor:MAX_RECORDS": (
        "step records that wait for a driver; the oldest are dropped and counted"
    ),
    "megascale_executor:MAX_SAMPLE_BYTES": "of a line that a heartbeat shows",
    "megascale_executor:MAX_TOPOLOGY_LABELS": "placement looks at a handful",
    "megascale_executor:MAX_WORLD_SIZE": "above any fleet; a larger number is a mistake",
    "megascale_planner:MAX_DEVICES": "the search is still exact and quick there",
    "megascale_trainer:KEPT_SAVES": "saves from whose times the interval is chosen",
    "megascale_trainer:KEPT_STEPS": "steps from whose times the interval is chosen",
    "megascale_trainer:MAX_DAMAGE_CHARS": _ERROR,
    "megascale_trainer:MAX_ERROR_CHARS": _ERROR,
}
