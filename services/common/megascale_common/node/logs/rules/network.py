"""Faults of RDMA devices and connections, as NCCL, UCX and the kernel report them."""

from __future__ import annotations

from megascale_common.node.logs.signature import text

# Error codes of completions as mlx5 prints them (mlx5 Programmer's Reference Manual, CQE syndrome).
_SYNDROME = r"\bsynd(?:rome)? 0x{}\b"
_SYNDROMES = ("synd 0x", "syndrome 0x")
_WC = r"Got completion .*(?:status=(?:IBV_WC_\w+\()?|(?:with )?error ){}\b"

NETWORK = (
    text("rdma-flush", "rdma_flush_secondary", "secondary", "none", "Got completion",
         "Work Request Flushed", "WR_FLUSH_ERR", "WR Flush", *_SYNDROMES,
         pattern=_WC.format("5") + r"|(?i:Work Request Flushed|WR_FLUSH_ERR|WR Flush)"
                 r"|" + _SYNDROME.format("5")),
    text("rdma-protection", "rdma_local_protection", "root", "restart", "Got completion",
         "local protection", "Local protection", "local access violation", "LOC_PROT_ERR",
         *_SYNDROMES,
         pattern=_WC.format("4") + r"|[Ll]ocal protection|local access violation|LOC_PROT_ERR"
                 r"|" + _SYNDROME.format("(?:1|2|4|6|11)")),
    text("rdma-remote", "rdma_remote_error", "secondary", "none", "Got completion",
         "REM_ACCESS_ERR", "REM_INV_REQ", "REM_OP_ERR", "emote access error",
         "emote invalid request", "emote operation error", "Remote access on", *_SYNDROMES,
         pattern=_WC.format("(?:9|10|11)") + r"|REM_(ACCESS|INV_REQ|OP)_?(ERR)?"
                 r"|[Rr]emote (access (error|on)|invalid request|operation error)"
                 r"|" + _SYNDROME.format("(?:1[0234]|22)")),
    text("rdma-retry", "rdma_retry_exceeded", "root", "restart", "Got completion",
         "retry count", "RETRY_EXC_ERR", "retry exceeded", *_SYNDROMES,
         pattern=_WC.format("1[23]") + r"|(?i:(transport|RNR) retry count)|RETRY_EXC_ERR"
                 r"|(transport|RNR|rnr) retry exceeded|" + _SYNDROME.format("1[56]"), weak=True),
    text("rdma-device", "rdma_device_fatal", "root", "evict_restart", "Got async", "async fatal",
         "mlx5_core", "LOCAL CATASTROPHIC", "EVENT_DEVICE_FATAL",
         pattern=r"(?i:local catastrophic error|async fatal event|device fatal)|DEVICE_FATAL"
                 r"|mlx5_core .*(health compromised|firmware internal error"
                 r"|Fatal error \d+ detected|device's health compromised)"),
    text("nic-stalls", "rdma_device_fatal", "root", "alert", "NETDEV WATCHDOG",
         "TX timeout detected",
         "assert_var", "wait_func",
         pattern=r"NETDEV WATCHDOG|TX timeout detected|mlx5\w* .*(assert_var|wait_func.* timeout)",
         kernel=True),
    text("rdma-port", "rdma_link_flap", "root", "alert", "port error", "lost carrier", "ink DOWN",
         "ink Down", "ink down", "ink is Down", "definitely down", "Cable unplugged",
         "EVENT_PORT_ERR", "High Temperature", "to DOWN", "arrier lost",
         pattern=r"async (error )?event.*port error|[Ll]ost carrier|Link (is )?(DOWN|[Dd]own)"
                 r"|link status definitely down|Cable unplugged|EVENT_PORT_ERR"
                 r"|[Pp]ort \d+.*(state )?changed? (state )?to DOWN|[Cc]arrier lost"
                 r"|Port module event.*High Temperature"),
    text("rdma-qp", "rdma_qp_setup_failed", "root", "restart", "ibv_modify_qp", "modify QP",
         "ibv_create_qp", "ibv_create_ah", "ibv_query_gid", "create QP",
         "rdma_resolve_", "rdma_connect", "change QP", "failed to create", "obj_create(QP)",
         "failed to process command", "ailed to allocate pd", "get local LID", "GID index",
         pattern=r"ibv_modify_qp\S* failed|([Ff]ailed|[Uu]nable) to (modify|create"
                 r"|change) (\w+ )?QP"
                 r"|obj_create\(QP\) failed|ibv_(create_ah|query_gid)\b.{0,160} failed"
                 r"|[Cc]ouldn't create QP"
                 r"|rdma_(resolve_(addr|route)|connect)\S* .*(failed|error)"
                 r"|efa\S*: Failed to (process command|allocate)|get local LID"
                 r"|(?i:unable to find .*GID)"
                 r"|ibv_create_qp\S* failed(?!.*Cannot allocate memory)"),
    text("rdma-memlock", "memlock_limit", "root", "stop", "Cannot allocate memory", "MEMLOCK",
         "max locked memory", "allocate some locked memory", "locked memory limit", "mlock",
         "lock memory",
         pattern=r"(ibv_(exp_)?reg_\w*mr|ibv_create_(cq|qp)|ibv_reg_mr_iova2?)\b.*Cannot allocate"
                 r"|RLIMIT_MEMLOCK|max locked memory|locked memory limit"
                 r"|allocate some locked memory|\bmlock(all)?\b.*(failed|Cannot allocate)"
                 r"|([Ff]ailed|[Uu]nable) to m?lock memory"),
    text("rdma-mtt", "rdma_mr_limit", "root", "alert", "registering part of your physical"),
    text("rdma-mr-limit", "rdma_mr_limit", "root", "stop", "MKEY", "reg mr failed", "reg_mr",
         "egister memory", "memory regions", "max_mr",
         pattern=r"CREATE_MKEY.*failed|reg mr failed|too many memory regions|\bmax_?mr\b"
                 r"|max MR count"
                 r"|(reg_\w*mr|egister memory)\b.*(No space left|RC: -28)", kernel=True),
    # Every rank prints it, whichever node lacks a card.
    text("nccl-net-count", "rdma_device_fatal", "root", "alert",
         "mixed local Net device counts"),
    text("nccl-no-net", "rdma_device_fatal", "root", "evict_restart", "NCCL WARN NET/IB",
         pattern=r"No device found|Unable to open device"),
)  # fmt: skip
