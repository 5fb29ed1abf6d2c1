"""Why bounds are as they are, for those whose constant has no comment that says it."""

from __future__ import annotations

_ERROR = "an error's text in a message; the log has the whole"
_NAMED = "names in one sentence; a sentence with more is not read"
_DEVICES = "devices of a node, far above any machine"

# By module:NAME. docs.generate_limits fails for a bound that has neither a comment nor a line here.
REASONS = {
    "megascale_checkpoint/jobs:MAX_ERROR_CHARS": _ERROR,
    "megascale_checkpoint/jobs:KEPT_DAMAGED": "damaged slots that a heartbeat names, the newest",
    "megascale_checkpoint/write_limit:KEPT_JOBS": "jobs whose writing rate is remembered",
    "megascale_checkpoint/local_server:MOST_DRAIN_S": "longest that a worker may ask for to drain",
    "megascale_checkpoint/registration:MOST_IN_FLIGHT": "snapshots of a rank under way; more means "
    "that its store is too slow",
    "megascale_checkpoint/registration:MOST_LOCAL_RANKS": _DEVICES,
    "megascale_checkpoint/replicas/sender:MAX_ERROR_CHARS": _ERROR,
    "megascale_checkpoint/replicas/streams:MOST_BREAKS": "broken connections of one transfer; then "
    "it fails, and the next snapshot tries",
    "megascale_checkpoint/storage/s3:MAX_PARTS": "of one upload, by S3",
    "megascale_common/node/framing:MAX_MESSAGE_BYTES": "a message between processes of one node; "
    "large data is in shared memory",
    "megascale_common/node/framing:MAX_DESCRIPTORS": "files passed with one message",
    "megascale_common/node/logs/matcher:MAX_SAMPLE_CHARS": "of a line that a heartbeat shows",
    "megascale_common/node/logs/templates:MAX_TEMPLATES": "kinds of unknown lines that are told "
    "apart; the rest is counted together",
    "megascale_common/node/logs/templates:MAX_WORDS": "of a line, for its template",
    "megascale_common/node/spans/ops:MAX_OPS": "names of operations in a ring's header",
    "megascale_common/node/spans/ops:MAX_NAME_CHARS": "the header has fixed fields",
    "megascale_common/node/status_page:MAX_ROWS": "groups and streams of a rank: the page is of a "
    "fixed size",
    "megascale_common/service/identity/oidc:MAX_BYTES": "a provider's document; real ones have "
    "a few KiB",
    "megascale_common/service/identity/rates:CALLS_PER_S": "calls that one identified caller may "
    "begin a second: a program that has gone wrong must not take a server from all others",
    "megascale_common/service/identity/rates:BURST_CALLS": "the same at once: a page of lists, or "
    "a node's start, needs tens",
    "megascale_common/service/metrics:MAX_REQUEST_BYTES": "a scrape's request has some hundred",
    "megascale_common/service/metrics:MAX_CONNECTIONS": "scrapers at once; there are one or two",
    "megascale_dashboard/cluster_reader:KEPT_ANSWERS": "of the driver, shared by all who look "
    "within a second",
    "megascale_dashboard/cluster_reader:MAX_CHECKPOINTS": "of a job that a page shows, the newest",
    "megascale_dashboard/cluster_reader:MAX_FOLLOWED": "jobs whose steps are followed; the one "
    "looked at longest ago is let go",
    "megascale_dashboard/cluster_reader:MAX_JOBS": "that a page shows",
    "megascale_dashboard/cluster_reader:MAX_NODES": "that a page shows, above the largest fleet "
    "that was simulated",
    "megascale_dashboard/live:MAX_STREAMS": "open pages that are told of changes; further ones ask "
    "every few seconds",
    "megascale_dashboard/server:MAX_FORM_BYTES": "the form has a token, nothing else",
    "megascale_driver/analysis/baselines:MAX_KEYS": "checks by device model and target; the one "
    "that was measured longest ago is forgotten",
    "megascale_driver/analysis/baselines:MAX_NODES": "nodes with figures, above the largest fleet "
    "that was simulated",
    "megascale_driver/analysis/progress:MAX_STEP_TIMES": "step times for a job's typical one",
    "megascale_driver/core/blame:MAX_CHECK_ROOTS": "roots looked at when a failure is explained",
    "megascale_driver/core/breaker:MAX_NAMED": _NAMED,
    "megascale_driver/core/explain:MAX_ACTIONS": _NAMED,
    "megascale_driver/core/forgetting:MAX_NAMED": _NAMED,
    "megascale_driver/core/goodput:MAX_MARKS": "open spans of one job's account",
    "megascale_driver/core/hang:MAX_EVIDENCE": "ranks whose position an event shows",
    "megascale_driver/core/hang:MAX_NAMED": _NAMED,
    "megascale_driver/core/log_roots:MAX_NAMED": _NAMED,
    "megascale_driver/core/plausible:MAX_ATTEMPT": "a stored job with more is damaged",
    "megascale_driver/core/restored:MAX_PROBLEM": _ERROR,
    "megascale_driver/core/rolling_back:MAX_ROLLBACKS": "of one job; more is no divergence but a "
    "wrong job",
    "megascale_driver/core/searching:MAX_NAMED": _NAMED,
    "megascale_driver/core/searching:MAX_HELPERS": "idle nodes that a search for a culprit borrows",
    "megascale_driver/core/suggestions:MAX_SUGGESTIONS": _NAMED,
    "megascale_driver/shell/feeds:MAX_TOKEN_DIGITS": "of a position in a page token, which clients "
    "send",
    "megascale_driver/nodes/checks:MAX_DETAIL": _ERROR,
    "megascale_driver/journal/fenced:MAX_BYTES": "half of what etcd takes in one request",
    "megascale_driver/service/link_service:MAX_BATCH_BYTES": "a larger batch of spans is refused",
    "megascale_driver/service/link_service:MAX_BATCH_SPANS": "32 KiB before they are compressed",
    "megascale_driver/service/spans:MAX_NAMES": "operations that a heat map is asked for",
    "megascale_driver/service/spans:MAX_DECLINE_STEPS": "that windows of a falling MFU have",
    "megascale_driver/service/spans:MAX_TIMELINE_STEPS": "of a trace; viewers slow down beyond",
    "megascale_driver/service/spans:MAX_STEPS": "that a heat map reads, in the store's one thread",
    "megascale_driver/telemetry/store:MAX_NAME_CHARS": "of a counter's name, and its "
    "target; a batch with a longer one is dropped",
    "megascale_driver/telemetry/intake:MAX_WAITING_BYTES": "spans that wait for the store's "
    "thread; the newest are dropped and counted",
    "megascale_driver/service/link_service:MAX_HEARTBEAT_BYTES": "a larger one is dropped, and "
    "still proves its agent alive",
    "megascale_planner/search:MAX_DEVICES": "the search is still exact and quick there",
    "megascale_driver/platform/local_node:MAX_PAGE": "nodes in one answer, as the service has it",
    "megascale_driver/presence/lane:MAX_BEHIND_S": "by which deadlines of silence move at most "
    "while the driver itself is behind",
    "megascale_driver/presence/inbox:MAX_PROGRESS": "reports of progress that wait for the core; "
    "a newer one replaces the one before",
    "megascale_driver/presence/reports:MAX_NAME": "characters of a name in a heartbeat; the rest "
    "is cut",
    "megascale_driver/presence/reports:MAX_OPERATIONS": "of one rank in a heartbeat",
    "megascale_driver/presence/reports:MAX_TEXT": "characters of an error in a heartbeat",
    "megascale_driver/presence/reports:MAX_TRACES": "of one profile",
    "megascale_driver/presence/reports:MAX_LOGS": "kinds of lines in a heartbeat",
    "megascale_driver/presence/reports:MAX_SAMPLE": "characters of a line in a heartbeat",
    "megascale_driver/service/driver:MAX_PAGE": "entries of one answer; further pages have "
    "the rest",
    "megascale_driver/service/driver:MAX_REQUEST_ID": "characters; it is stored for a day",
    "megascale_driver/service/driver:MAX_REASON": "characters of a person's reason in the audit "
    "log",
    "megascale_driver/service/watch:MAX_LOG_LINES": "of one TailLogs, as the node has it",
    "megascale_driver/service/watch:MAX_OFFSET_DIGITS": "of a resume position, which clients send",
    "megascale_driver/wire/messages:MAX_DEVICES": _DEVICES,
    "megascale_driver/wire/messages:MAX_TEXT": _ERROR,
    "megascale_driver/wire/messages:MAX_LABELS": "of a node's topology",
    "megascale_executor/agent/config:MAX_DEVICES": _DEVICES,
    "megascale_executor/agent/config:MAX_TOPOLOGY_LABELS": "placement looks at a handful",
    "megascale_executor/agent/config:MAX_FAST_COUNTERS_MS": "the other sampling has every second",
    "megascale_executor/agent/group_checks:MAX_WORLD_SIZE": "above any fleet; a larger number is "
    "a mistake",
    "megascale_executor/agent/heartbeat:MAX_REASON_CHARS": "a heartbeat has to stay below 64 KiB",
    "megascale_executor/agent/job_code:MAX_FILES": "more is no job's code but a folder of data",
    "megascale_executor/agent/job_code:MAX_BYTES": "more is no job's code but a folder of data",
    "megascale_executor/agent/link:MAX_HEARTBEAT_BYTES": "what the driver takes; a longer one is "
    "shortened, least important content first",
    "megascale_executor/agent/log_scanner:MAX_SAMPLE_BYTES": "of a line that a heartbeat shows",
    "megascale_executor/agent/log_scanner:MAX_FINGERPRINTS": "kinds of lines in a heartbeat",
    "megascale_executor/agent/stacks:MAX_FRAMES": "innermost ones, which say where a rank was",
    "megascale_executor/agent/stacks:MAX_CHARS": "of a stack that a heartbeat carries",
    "megascale_executor/agent/rank_logs:MAX_LINES": "of one TailWorkerLogs; ask for less at once",
    "megascale_executor/agent/rank_logs:MAX_LINE_CHARS": "of a line in an answer; the rest is cut",
    "megascale_executor/agent/step_reports:MAX_RECORDS": "step records that wait for a driver; the "
    "oldest are dropped and counted",
    "megascale_executor/agent/worker_status:MAX_OPERATIONS": "of one rank in a heartbeat",
    "megascale_executor/agent/worker_status:MAX_ERROR_CHARS": _ERROR,
    "megascale_executor/agent/worker_status:MAX_KIND_CHARS": "characters of an exception's name",
    "megascale_executor/counters/sampler:MAX_COUNTERS": "of a node; further ones are left out",
    "megascale_executor/counters/sampler:MAX_IN_HEARTBEAT": "a heartbeat has to stay below 64 KiB",
    "megascale_executor/diagnostics/finding:MAX_DETAIL_CHARS": "of a check's result",
    "megascale_executor/diagnostics/node_tests:MAX_OUTPUT_BYTES": "that a test's process may print",
    "megascale_executor/diagnostics/path_mtu:MAX_PEERS": "hosts that one check pings",
    "megascale_executor/diagnostics/path_mtu:MAX_PACKET": "an IP packet has no more",
    "megascale_trainer/process/worker:MAX_ERROR_CHARS": _ERROR,
    "megascale_trainer/save_cost:KEPT_SAVES": "saves from whose times the interval is chosen",
    "megascale_trainer/save_cost:KEPT_STEPS": "steps from whose times the interval is chosen",
    "megascale_trainer/restore_votes:MAX_DAMAGE_CHARS": _ERROR,
    "megascale_cli/demo/plan:MAX_STEPS": "the demo is to end within two minutes",
    "megascale_cli/logs:MAX_LINES": "what the service gives at once",
    "megascale_client/connection:MAX_MESSAGE_BYTES": "the same limit as on the server's side",
    "megascale_client/job_file:MAX_FILE_BYTES": "a job file has a few KiB",
}
