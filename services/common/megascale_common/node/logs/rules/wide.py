"""The vocabularies of faults: status enumerations and the words that texts of one cause share.

Tried after the signatures of single texts, and not on lines that call themselves information.
Enumerations: cudaError_t (driver_types.h 12.9), cuBLAS and cuDNN status, hipError_t, HSA status,
ibv_wc_status and ibv_event_type (verbs.h), errno strings, endings of Slurm, PBS and LSF.
"""

from __future__ import annotations

from megascale_common.node.logs.signature import wide

_GPU = (
    wide("hip-fault", "cuda_illegal_access", "root", "restart", "memory access fault by gpu",
         "hsa_status_error", "hiperror",
         pattern=r"memory access fault by GPU"
                 r"|HSA_STATUS_ERROR\w*(APERTURE_VIOLATION|ILLEGAL_INSTRUCTION|EXCEPTION"
                 r"|MEMORY_FAULT)"
                 r"|hipError(IllegalAddress|LaunchFailure|IllegalInstruction|MisalignedAddress)"),
    wide("amdgpu-memory", "gpu_ecc_uncorrectable", "root", "evict_restart", "amdgpu", "RAS: unc",
         pattern=r"\bRAS: uncorrectable error"
                 r"|amdgpu.*(?<!\b0 )uncorrectable (hardware )?errors? (detected|found)",
         kernel=True),
    wide("amdgpu-lost", "gpu_fallen_off_bus", "root", "evict_restart", "amdgpu",
         pattern=r"amdgpu.*(lost from bus|fallen off)", kernel=True),
    wide("gpu-page-fault", "gpu_mmu_fault", "root", "restart", "protection_fault", "amdgpu",
         "mtgpu", "fault_pde", "fault_pte",
         pattern=r"amdgpu.*page fault|VM_\w*PROTECTION_FAULT|MTGPU.*\bfault\b"
                 r"|\bFAULT_P[DT]E\b.*ACCESS_TYPE", kernel=True),
    wide("amdgpu-init", "gpu_init_failed", "root", "evict_restart", "amdgpu",
         pattern=r"amdgpu.*(fatal error during GPU init|ip_init failed|hw_init of .*failed)",
         kernel=True),
    wide("amdgpu-hang", "gpu_channel_error", "root", "restart", "amdgpu", "HW Exception by GPU",
         pattern=r"amdgpu.*(ring \S+ timeout|GPU reset begin|MES failed|HWS hang|failed to evict)"
                 r"|HW Exception by GPU", kernel=True),
    wide("gpu-handle", "gpu_fallen_off_bus", "root", "evict_restart", "device handle for",
         "NVMLError_GpuIsLost", "NVML_ERROR_GPU_IS_LOST", "is lost",
         pattern=r"unable to \w+ the device handle for|GPU_?Is_?Lost|\bGPU \S+ is lost\b"),
    wide("gpu-missing", "gpu_fallen_off_bus", "root", "alert", "low gres", "low gpu count",
         "gpus, expected", "missing gpu",
         pattern=r"low (gres/)?gpu count|\b\d+ GPUs?, expected \d+|\bmissing GPUs?\b.{0,40}"
                 r"(detected|expected|found)"),
    wide("nvrm", "gpu_init_failed", "root", "evict_restart", "nvrm", "probe",
         pattern=r"NVRM:.*(I/O region assigned to your NVIDIA device is invalid|BAR\d is 0M"
                 r"|no nvidia \w+ (\w+ )?(found|probed)|none of the nvidia"
                 r"|failed to (initiali[sz]e|load|copy vbios|enable|register|allocate NvKms)"
                 r"|probe routine was not called|initiali[sz]ation (of .*)?failed"
                 r"|cannot initiali[sz]e the device|FSP command timed out"
                 r"|nvidia_\w*open: failed)"
                 r"|nvidia( \S+)?: probe .*failed", kernel=True),
    wide("nvlink", "nvlink_error", "root", "alert", "nvlink", "knvlink", "xgmi",
         "<inactive>",
         pattern=r"(NVRM|nvidia-nvlink|nvswitch).*nvlink.*(fail|error|timeout|timed out|down\b)"
                 r"|nvlink\w*:? .*(training (failed|error)|link (\d+ )?(is )?down|fatal error)"
                 r"|NVLINK_ERROR|uncorrectable nvlink|disabled between nvlink connected"
                 r"|\blink \d+: <inactive>|xgmi.*(link|uncorrect)\w* ?(error|fail)"
                 r"|nvlink (crc|replay|recovery) error count exceeded", kernel=True),
    wide("nvlink-told", "nvlink_error", "root", "alert", "nvlink_down", "nvlink link",
         "nvlink replay", "nvlink crc", "nvlink recovery", "nvlink errors", "fully trained",
         pattern=r"NVLINK_DOWN|nvlink link \d+ is (currently )?down"
                 r"|nvlink (replay|crc|recovery) errors?\W+[1-9]|links aren't fully trained"
                 r"|nvlink errors on GPU \d+.{0,40}exceeds"),
    wide("remap-pending", "gpu_row_remap", "root", "alert", "remapped rows",
         "pending page blacklist", "remapping pending", "row remap pending",
         pattern=r"(remapped rows\b.{0,160}\bpending|pending page blacklist|remap\w* pending)"
                 r"\W+yes"),
    wide("ecc-told", "gpu_ecc_uncorrectable", "root", "evict_restart", "dbe errors",
         "double bit", "double-bit", "volatile ecc", "ecc errors",
         pattern=r"dbe errors than allowed|double[- ]bit ecc errors?\W+[1-9]"
                 r"|\bGPU\b.{0,60}\b[1-9]\d* (volatile )?uncorrectable (volatile )?ecc errors"),
    wide("gsp-told", "gsp_rpc_timeout", "root", "restart", "gsp rpc", "_gsp:",
         pattern=r"NVRM:.*(GSP RPC (buffer contains|error)|rpcRm\w+_GSP: .*failed)", kernel=True),
    wide("driver-libraries", "driver_mismatch", "root", "evict_restart", "mismatch",
         "match kernel module",
         pattern=r"(driver|kernel module|client|library)\W.{0,60}version mismatch"
                 r"|(version mismatch with|does not match) (the )?kernel module"
                 r"|LibRmVersionMismatch"),
    wide("driver-module", "driver_mismatch", "root", "evict_restart", "kernel module has the",
         "have the same version",
         pattern=r"kernel module has the version|components have the same version", kernel=True),
    wide("driver-old", "driver_mismatch", "root", "stop", "unsatisfied condition",
         "nvidia driver", "gpu driver", "cuda driver", "unsupported", "incompatible", "version:",
         pattern=r"unsatisfied condition: cuda|update your (GPU|NVIDIA|CUDA) driver"
                 r"|(nvidia|GPU|CUDA) driver\b.{0,60}(too old|older than|not support"
                 r"|requires? (at least )?version)|driver version is insufficient"
                 r"|unsupported (CUDA|driver)( driver| runtime)? version|CUDA version: driver"
                 r"|(driver|CUDA) versions? .{0,60}(incompatible|mismatch|older than|too low)"),
    wide("cuda-oom-words", "cuda_oom", "root", "stop", "out of memory", "outofmemory",
         "out of the memory",
         "handle failed", "not enough gpu memory", "failed to alloc", "cuda malloc", "cudamalloc",
         "out_of_resources", "alloc_failed", "unable to allocate", "resource_exhausted",
         "cannot allocate memory",
         pattern=r"\b(CUDA|GPU|device|HIP|HBM|VRAM|NPU|XPU|MPS|cu(dnn|blas))\w*\b.{0,160}"
                 r"out[ _]of[ _](the )?memory"
                 r"|out of memory.{0,80}\b(CUDA|GPU|device|allocating|Tried)\b"
                 r"|\b(cuda|gpu)\b.{0,20}cannot allocate memory|reason[:=] out of memory"
                 r"|RESOURCE_EXHAUSTED: .{0,60}alloc"
                 r"|cudaMalloc\w*.{0,80}fail"
                 r"|(cublas|cudnn|cusolver|cusparse)\w* handle failed"
                 r"|not enough (free )?(GPU|CUDA|device|video) memory|hipErrorOutOfMemory"
                 r"|HSA_STATUS_ERROR_OUT_OF_RESOURCES|CUSOLVER_STATUS_ALLOC|CUFFT_ALLOC"
                 r"|(failed|unable) to alloc\w* .{0,60}\b(GPU|device|CUDA|VRAM)\b",
         unless="unable to allocate resources"),
    wide("cuda-assert-words", "cuda_device_assert", "root", "stop", "assertion",
         pattern=r"\.cuh?:\d+.*assertion .*failed|thread:? [\[(]\d+,\d+,\d+[\])],? assertion"),
    wide("cuda-illegal-words", "cuda_illegal_access", "root", "restart", "illegal access",
         "illegal address", "warp illegal", "invalid device function call", "exec_failed",
         "illegal memory", "out-of-range address", "out of range address", "__global__",
         pattern=r"invalid __(global|shared|local)__ (read|write) of size|(warp|lane|device|cuda"
                 r"|gpu).{0,60}(illegal|out[- ]of[- ]range) (memory )?"
                 r"(access|address)|CUFFT_EXEC_FAILED|illegal memory access"),
    wide("gpu-busy-words", "gpu_busy", "root", "restart", "exclusive", "in use by another",
         "device in use",
         pattern=r"(GPU|device).{0,60}(in use by another|already in use by)"
                 r"|exclusive.{0,20}(process|thread) mode.{0,60}(busy|in use|fail)"),
    wide("gpu-none", "gpu_init_failed", "root", "restart", "available", "detected",
         "initiali", "nvml", "cuinit", "device ordinal", "hiperrornodevice", "is not able to use",
         "no nvidia", "no cuda", "nvidia devices",
         pattern=r"cuda\w*\b.{0,160}initialization error|"
                 r"no (CUDA|NVIDIA|HIP|ROCm)[- ](GPU|device|runtime|capable)\w*.{0,30}"
                 r"(found|detected|available)|no (available )?GPUs? (was |were )?(found|detected)"
                 r"|CUDA is not available|torch is not able to use GPU|cuInit\W.{0,60}(fail|error)"
                 r"|nvmlInit\w*\W.{0,60}(fail|error)|invalid device ordinal"
                 r"|NVMLError_(Uninitialized|DriverNotLoaded|LibraryNotFound|Unknown)"
                 r"|(could not|cannot|can't|failed to|unable to) (init\w*|load|open|start)"
                 r"( the)? (NVML|CUDA)\b(?! ext)|CUDA initiali[sz]ation (error|fail)"
                 r"|failed to query nvidia devices|hipErrorNoDevice|NVML: Unknown Error"
                 r"|CUDA: initiali[sz]ation error"),
)  # fmt: skip

_HOST = (
    wide("host-oom-words", "host_oom", "root", "restart", "exceed", "killed as a result",
         "oomcontroller", "low on memory", "memory pressure", "memory low", "of memory",
         "memory usage threshold", "MemoryError", "term_memlimit", "vmem",
         "resource: memory", "out_of_memory", "oom killer", "oomd", "earlyoom", "oom score",
         "oom event",
         pattern=r"exceeded (the )?(\w+ ){0,2}memory limit|killed as a result of limit of"
                 r"|OOMController|running low on memory|due to memory pressure"
                 r"|exceeds the memory usage threshold|system memory low"
                 r"|avoid running out of memory|TERM_MEMLIMIT"
                 r"|job killed: v?mem|v?mem \S+ exceeded limit|low on resource: memory"
                 r"|state[=: ]+OUT_OF_MEMORY|killed by (the )?(\w+ )?oom[ -]?killer"
                 r"|(oomd|earlyoom)\S* .*(kill|SIGTERM|SIGKILL)"
                 r"|memory limit.{0,60}(exceeded|killed)|oom event"),
    wide("dimm-ue-words", "host_dimm_ue", "root", "evict_restart", "uncorrect",
         pattern=r"^(?=.*(dimm|memory (module|device|controller|bank)|\bSEL\b|ipmi|bmc))"
                 r".*(?<!\b0 )\buncorrect(able|ed)\b(?!.*\b(0|no) errors?)",
         unless="gpu|nvidia|cuda", kernel=True),
    wide("dimm-ce-words", "host_dimm_ce", "root", "alert", "correctable", "corrected",
         pattern=r"^(?=.*(dimm|memory (module|device|controller|bank|error|read|scrub|#)|\bSEL\b"
                 r"|ipmi|bmc|\bMC#?\d)).*(?<!\b0 )\bcorrect(able|ed)\b"
                 r"|predictive failure.*dimm|dimm.*predictive failure",
         unless="gpu|nvidia|cuda|pci", kernel=True),
    wide("machine-check", "host_hardware_error", "root", "evict_restart", "machine check",
         "context corrupt", pattern=r"machine check exception|processor context corrupt"
                                    r"|fatal machine check", kernel=True),
    wide("kernel-died", "host_lockup", "root", "evict_restart", "stuck for", "kernel paging",
         "fixing recursive", "unable to handle kernel", "fatal exception in interrupt",
         pattern=r"CPU#\d+ stuck for|unable to handle kernel|fixing recursive fault"
                 r"|fatal exception in interrupt", kernel=True),
    wide("board-words", "host_hardware_error", "root", "alert", "nmi received for unknown",
         "IERR", "CATERR", "PMIC", "clock throttled", "power supply", "core temperature",
         pattern=r"NMI received for unknown reason|\b(IERR|CATERR|PMIC_ERR)\b|cpu clock throttled"
                 r"|power supply\b.{0,40}\b(lost|fail\w*|deasserted)\b", kernel=True),
    wide("pcie-words", "pcie_error", "root", "alert", "containment event",
         "pcie link", "pcie width", "pcie speed",
         pattern=r"DPC: .*containment event"
                 r"|PCIe (link|width|speed)\b.{0,20}\bdegrad", kernel=True),
    wide("disk-words", "host_disk_failed", "root", "alert", "nvme", "blk_update_request",
         "medium error", "smartd",
         pattern=r"nvme nvme\d+: (.*(timeout|abort|failed|not ready|removing)|i/o \d+)"
                 r"|blk_update_request: .*error|medium error|smartd.*(fail|uncorrectable sectors"
                 r"|critical warning)",
         kernel=True),
)  # fmt: skip

_NETWORK = (
    wide("wc-flush-words", "rdma_flush_secondary", "secondary", "none", "flushed", "flush_err",
         pattern=r"work request\w* flush(ed)?|\bWR_FLUSH|request(s)? (was|were) flushed"),
    wide("wc-local", "rdma_local_protection", "root", "restart", "local length", "local qp",
         "local ee", "local access", "loc_len", "loc_qp", "loc_eec", "loc_access", "mw_bind",
         "local work queue", "memory window", "memory management operation", "loc_rdd",
         "local rdd", "failed status",
         pattern=r"failed status [12346]\b.*(wr_id|syndrom)"
                 r"|local (length|QP operation|EE context operation|access violation"
                 r"|RDD violation) ?(err|work)?|LOC_(LEN|QP_OP|EEC_OP|ACCESS|RDD_VIOL)_ERR"
                 r"|MW_BIND_ERR|memory (window bind|management operation) error"
                 r"|local work queue"),
    wide("wc-remote", "rdma_remote_error", "secondary", "none", "remote aborted", "bad response",
         "rem_abort", "bad_resp", "rem_inv_rd", "remote invalid", "rem_access", "rem_op",
         "remote access", "remote operation",
         pattern=r"remote (aborted|invalid R\w+ request|access|operation) err|bad response err"
                 r"|REM_(ABORT|ACCESS|OP|INV_\w+)_ERR|BAD_RESP_ERR"),
    wide("wc-retry", "rdma_retry_exceeded", "root", "restart", "resp_timeout", "response timeout",
         "unresponsive", "unreachable remote", "rnr_retry", "endpoint timeout", "undeliverable",
         "retry counter",
         "retry count", "retries exceeded", "retry exceeded", "retry_exc", "failed status",
         pattern=r"RESP_TIMEOUT_ERR|response timeout err|unresponsive (remote|receiver|peer)"
                 r"|(remote|receiver|peer) (is )?unresponsive|unreachable remote|RNR_RETRY"
                 r"|RETRY_EXC|retry count\w*.{0,60}exceeded"
                 r"|retry exceeded|failed status 1[23]\b.*(wr_id|syndrom)"
                 r"|transport retr(y|ies) .{0,20}exceeded"
                 r"|transport error: endpoint timeout|\(UNDELIVERABLE\)", weak=True),
    wide("rdma-memory", "memlock_limit", "root", "stop", "cannot allocate memory", "enomem",
         "mr_reg", "ibv_reg", "reg_mr", "memory registration",
         pattern=r"(mr_reg|reg_\w*mr|ibv_reg\w*|create_cq|create_qp"
                 r"|register\w* (the )?(memory|buffer)|memory registration).{0,300}"
                 r"(cannot allocate memory|\bENOMEM\b|errno[ :=]*12\b|ret\w*[ :=]*-12\b)"),
    wide("nic-fatal", "rdma_device_fatal", "root", "evict_restart", "mlx4_core", "mlx5_core",
         "bnxt_en", "irdma", "efa", "wc_fatal", "catastrophic",
         pattern=r"(mlx[45]_core|bnxt_en|bnxt_re|irdma|\befa\b).*(load_one failed|probe of \S+ "
                 r"failed|probe failed|catastrophic|internal error|unhealthy|fw fatal"
                 r"|handling bad device|firmware (is )?(hung|not respond\w+|fatal|in bad state)"
                 r"|handle_hca_cap failed"
                 r"|device is not functional|entering error state|recovery failed)"
                 r"|IBV_WC_FATAL_ERR|catastrophic error", kernel=True),
    wide("nic-error", "rdma_device_fatal", "root", "alert", "mlx4_core", "mlx5_core", "bnxt_en",
         "irdma", "mlx5_cmd",
         pattern=r"(mlx[45]_core|mlx5_cmd\w*|bnxt_en|irdma)\b.*(failed|error|timeout|syndrome)",
         unless="\\blink|access_reg|port module|cable", kernel=True),
    wide("qp-words", "rdma_qp_setup_failed", "root", "restart", "ibv_create", "ibv_modify",
         "ibv_alloc", "ibv_open", "ibv_query", "ibv_get", "ibv_exp", "mlx5dv_", "endpoint",
         "completion queue",
         "protection domain", "fi_endpoint", "fi_domain", "fi_fabric", "fi_getinfo", "fi_enable",
         "fi_cq_open", "fi_ep_bind", "address handle", "rdma_create", "rdma_connect", "create qp",
         "rdma_cm_event", "queue pair", "modify qp", "create cq", "create ib",
         "net/ofi", "qp information", "allocate mr",
         pattern=r"NET/OFI couldn't open|(call to )?(ibv|mlx5dv)_(exp_)?(create|modify|alloc|open"
                 r"|query|devx_obj"
                 r"|get)_\w+(\(.*?\))?:? "
                 r"(on \S+ )?(has )?(failed|error|returned)"
                 r"|fi_(endpoint|domain|fabric|getinfo|enable|cq_open"
                 r"|ep_bind|av_\w+)\W.{0,60}(fail|error)|RDMA_CM_EVENT_\w*(ERROR|REJECTED"
                 r"|UNREACHABLE)|creating new endpoint .*failed|rdma_(create|connect)\w*\W.{0,60}"
                 r"(fail|error)|(fail|unable|could not|couldn't|error)\w*.{0,40}"
                 r"(create|creating|allocate|open|get|modify|modifying|transition|connect|move"
                 r"|change)"
                 r"\w*.{0,30}\b(QP|IB resources|queue pair|completion queue|\bCQ\b"
                 r"|protection domain|libfabric endpoint|address handle)\b"),
    wide("link-words", "rdma_link_flap", "root", "alert", "link down", "link is down", "link lost",
         "carrier", "port down", "port is down", "port_err", "link flap", "cable", "port module",
         "state changed", "ib link", "ib port", "infiniband port",
         pattern=r"\b(ib|infiniband) port\b.*\b(flapped|down)\b"
                 r"|\bmlx\d_\d+\b.*state changed.*\bdown\b|\bib link \S+ is down|"
                 r"\b(ib\d+|mlx\d_\d+|eth\d+|enp\w+|eno\w+|ens\w+|bond\d+|rdma\d*|mlx5_core)\b.*"
                 r"\b(link (is )?(down|lost)|carrier lost|lost carrier|port (is )?down)"
                 r"|PORT_ERR|link flap|cable (error|unplugged)|port module event.*error"),
)  # fmt: skip

_COMMUNICATION = (
    wide("shm-words", "shm_exhausted", "root", "stop", "shared memory", "/dev/shm", "shm size",
         "shmget", "shm-size", "</torch_",
         unless="out of resource|hardware limit",
         pattern=r"unable to \w+ (\w+ ){0,3}(file|bytes).{0,40}</torch_"
                 r"|(insufficient|not enough|out of|exhausted|ran out of|too small).{0,30}"
                 r"(shared memory|/dev/shm|\bshm\b)|(/dev/shm|shared memory|\bshm(get)?\b).{0,80}"
                 r"(is full|too small|exhausted|no space left|exceeded|cannot allocate memory)"),
    wide("shm-gone-words", "shm_attach_failed", "root", "restart", "shared memory", "shm_open",
         "shmat", "shm_unlink",
         pattern=r"(could not|unable to|failed to|cannot|error while|error)\s?(un)?(link|open|"
                 r"opening|attach\w*|map\w*|mapping|find|access\w*)\b.{0,30}shared memory"
                 r"|shm_(open|unlink)\W.{0,60}(fail|no such)"),
    wide("versions-differ", "config_version_drift", "root", "stop", "versions",
         pattern=r"\bversions? (differ|mismatch|are different) (across|between|on) (the )?"
                 r"(ranks|nodes|hosts|workers)"),
    wide("fingerprint", "collective_mismatch", "root", "stop", "mismatch", "differ", "not match",
         "out of order", "different sizes", "desync",
         pattern=r"tensors? of different (size|shape)s? across ranks|collectives? desync"
                 r"|mismatched \w+ tensor (shapes|sizes|types)|mismatch\w* .{0,40}\b(across"
                 r"|between) (the )?ranks|collectives? .{0,60}"
                 r"(differ|mismatch|do(es)? not match)|ranks? .{0,60}different (number of )?"
                 r"(param|collective|tensor|sequence num)\w*|collectives? .{0,40}out of order"
                 r"|\bRAS\b.*\bmismatch\b", unless="version"),
    wide("rendezvous-words", "rendezvous_timeout", "root", "restart", "rendezvous", "tcpstore",
         "to GCS", "nodes to join",
         "c10d store", "store based barrier", "store->get", "init_process_group",
         "clients joined", "waiting for clients", "waiting for nodes", "waiting for workers",
         "timeout", "timed out", "connect to", "to reach", "pjrt_client_connect",
         "distributed service", "no route to host", "master_addr", "registertask",
         unless="waiting in store",
         pattern=r"bootstrap\w*\b.{0,60}(timed? ?out)|(rendezvous|TCPStore|c10d store"
                 r"|store based barrier|store->get|init_process_group"
                 r"|waiting for (clients|nodes|workers))"
                 r".{0,160}(timed? ?out\b|timeout (after|error|waiting)|failed\b|unable to|refused"
                 r"|could not)|(failed|unable) to (connect to|reach) (the )?(master|coordinator"
                 r"|head node|rank 0|rendezvous)|clients joined|PjRT_Client_Connect"
                 r"|timed out waiting for .{0,20}(nodes|workers|clients|hosts)\b"
                 r"|failed to connect to GCS|\] connect timeout\b"
                 r"|failed to connect to distributed service|CoordinationService/RegisterTask"
                 r"|(MASTER_ADDR|master|head node|rank 0)\b.{0,60}no route to host"
                 r"|no route to host.{0,60}(MASTER_ADDR|master\b)", weak=True),
    wide("collective-words", "collective_timeout", "secondary", "restart", "timed out",
         "timed-out", "timeout", "may be stuck", "join the rendezvous", "monitoredbarrier",
         "not all", "not complete", "times out",
         unless="waiting in store",
         pattern=r"(collective|all-?_?reduce|all-?_?gather|reduce_?scatter"
                 r"|broadcast|barrier(?!_id: PjRT)|all_?to_?all"
                 r"|[nhr]ccl\w*)\b.{0,160}(timed[ -]?out\b|timeout"
                 r" (error|expired|exceeded|reached|detected|after)|did not complete within)"
                 r"|timed out waiting for (all|reduce|broad|barrier)\w*|register times out"
                 r"|failed to pass "
                 r"monitoredBarrier|before timing out|global timeout from|timeout occurred while "
                 r"waiting|threads to join the rendezvous"
                 r"|this thread has been waiting for.*may be stuck|notify wait timeout"
                 r"|not all .{0,30}(ranks|workers|participants|threads) .{0,30}(arrived|joined)"),
    wide("peer-words", "peer_closed_secondary", "secondary", "none", "closed", "reset",
         "refused", "disconnected", "broken pipe", "brokenpipe", "lost", "aborted", "dropped",
         "terminated", "peer", "heartbeat", "all addresses", "econn", "epipe",
         pattern=r"(connection|socket|channel) (was |is |has been )?(unexpectedly )?(closed|reset"
                 r"|lost|aborted|dropped|broken|terminated)\b|peer (process )?(\w+ )?"
                 r"(unexpectedly )?(disconnected|closed|died|gone|hung up|exited|failure)"
                 r"|connect\w* .{0,60}refused|failed to connect to all addresses"
                 r"|stopped sending heartbeats|got no heartbeat|heartbeat timeout"
                 r"|\bECONN(RESET|REFUSED|ABORTED)\b"
                 r"|\bEPIPE\b|(BrokenPipe|Connection(Reset|Refused|Aborted))Error"
                 r"|remote (end|host|side) closed"),
)  # fmt: skip

_FILES = (
    wide("quota-words", "storage_quota", "root", "stop", "quota", "edquot", "block limit reached",
         "file limit reached", "block limit", "inode limit",
         unless="forbidden",
         pattern=r"((disk|block|inode|file|user|group|project|filesystem|storage) "
                 r"quota.{0,40}(exceed|reach|full)|(exceed\w*|over|out of) (the |your )?(\w+ )?"
                 r"(disk|storage|inode|file|block)? ?quota|EDQUOT|ErrQuota)"
                 r"|user (block|file) limit reached|over (hard |soft )?(block|file|inode) limit"),
    wide("mount-words", "storage_unreachable", "root", "alert", "mount", "lustre",
         "lnet", "gpfs", "mmfs", "ceph", "beegfs", "weka", "nfs:", "juicefs", "glusterfs",
         "host is down", "enotconn", "cifs", "libceph",
         pattern=r"FailedMount|\bmount error\b|(unable|failed) to (attach or )?mount"
                 r"|mount\w*\.\w+ failed"
                 r"|mount\.\w+: .*(timed out|refused|error|fail|no route|unreachable|denied)"
                 r"|\b(Lustre|LNet)(Error)?\b.*(fail|error|lost|evict|timed out|unreachable|down"
                 r"|inactive for)"
                 r"|\b(GPFS|mmfsd?)\b.*(unmount|panic|lost|fail|expel|unresponsive)"
                 r"|ceph.*(timed out|hung|blocked|not responding|lost|evict)"
                 r"|beegfs.*(error|timed out|unreachable)|wekafs?.*(unreachable|disconnect|fail)"
                 r"|nfs:.*(not responding|timed out)|\bENOTCONN\b|host is down"
                 r"|CIFS.*not responded|libceph: mds.*(closed|error|lost|hung)"
                 r"|glusterfs.*(disconnected|not connected)|juicefs.*(error|timeout)"),
    wide("io-words", "storage_write_failed", "root", "restart", "input/output error",
         "read-only file system", "errno 5", "errno 30", "erofs", "remote i/o", "errno",
         "i/o error",
         unless="prov_err|libfabric|prov/",
         pattern=r"(input/output error|read-only file system"
                 r"|\[?errno[ :=]*(5|30|121)\b|\bEROFS\b|os error 5\b|remote i/o error)"),
    wide("full-words", "storage_write_failed", "root", "stop", "no space", "disk full",
         "disk is full", "out of disk", "enospc", "not enough space", "insufficient space",
         "file system is full", "errno",
         unless="cgroup|inotify|sem(get|op)|shmget",
         pattern=r"no space left|disk (is )?full|out of disk space|ENOSPC|(not enough"
                 r"|insufficient) (free )?(disk )?space|file ?system is full|errno[ :=]*28\b",
         weak=True),
    wide("object-words", "storage_write_failed", "root", "restart", "slowdown", "slow down",
         "serverbusy", "request rate", "requesttimeout", "operationtimedout", "internalerror",
         "serviceunavailable", "bucket", "upload", "multipart", "http error", "timed out",
         "to endpoint", "from endpoint", "endpoint url", "datanodes are bad",
         pattern=r"\bSlowDown\b|503:? slow down|ServerBusy|reduce your request rate"
                 r"|OperationTimedOut|http error 50[0-4]|datanodes are bad"
                 r"|(unable to connect to|could not connect to the) endpoint"
                 r"|response from endpoint url|(s3|gcs|bucket|blob|multipart|upload)\w*"
                 r"\b.{0,120}(\b50[0234]\b|InternalError|ServiceUnavailable|RequestTimeout"
                 r"|timed out|broken pipe|connection reset)"),
    wide("save-words", "storage_write_failed", "root", "restart", "fail", "error", "unable to",
         "could not", "cannot", "couldn't",
         unless="/sys/fs/cgroup",
         pattern=r"\b(fail|error|unable|could not|cannot|couldn't)\w*\b.{0,60}\b(sav(e|ing)"
                 r"|writ(e|ing)|upload(ing)?|flush(ing)?)\b.{0,60}\b(checkpoint|ckpt|file|model"
                 r"|disk|bucket|storage|state|shard|optimizer|weights|s3|snapshot|/)"
                 r"|\b(checkpoint|ckpt|model)\b.{0,40}\b(sav|writ|upload)\w+ (has )?failed"
                 r"|\b(disk|file) write (error|failed)|torch\.save failed|\bsav(e|ing) i/o error"
                 r"|parent directory \S+ does not exist"),
    wide("stale-words", "storage_stale_handle", "root", "restart", "stale", "estale", "errno 116",
         pattern=r"stale (nfs )?file handle|\bESTALE\b|errno[ :=]*116\b"),
    wide("nan-words", "numeric_nan", "root", "stop", "nan", "nans", "non-finite", "nonfinite",
         "not finite", "infinite", "floatingpointerror", "inf", "probability tensor",
         pattern=r"(?:\b|_)(loss\w*|grad\w*([ _]norm)?|norm|ppl|perplexity|cost|logits?|weights?"
                 r"|param\w*|activations?|output|entropy|reward|kl)\b[^a-z]{0,12}\bnan\b(?! iter)"
                 r"|\b(is|are|was|were|be|become|became|becomes|got|has|have|contain|contains"
                 r"|containing|found|detected|encountered|hit|of|all|any|to) nans?\b(?! iter)"
                 r"|\bnans?\b (\w+ )?(grad|loss|norm|occur|detected|found|encountered|value|in )"
                 r"|\bnan or inf|\binf or nan|either inf, nan"
                 r"|(non-?finite|not finite|infinite) (\w+ )?(loss|grad"
                 r"|norm|value)|(loss|grad\w*|norm|value)\w* .{0,20}(non-?finite|not finite"
                 r"|infinite)|FloatingPointError|found (nan|inf) in|diverged\b.{0,20}\b(nan|inf)\b"
                 r"|invalid values\W.{0,60}\bnan\b"),
)  # fmt: skip

_ENDS = (
    wide("preempted-words", "scheduler_preempted", "root", "restart", "preempted", "preempting",
         "preemption", "imminent", "interruption", "spot instance", "spot interruption",
         "node_fail", "instances.preempted", "terminationbykubelet",
         "node is shutting down", "maintenance event", "to node fail",
         pattern=r"\b(job|instance|node|vm|pod|cluster|step|worker|task"
                 r"|trial)\b.{0,40}\bpreempted\b"
                 r"|preempt(ed|ing)\b.{0,40}\b(job|instance|node|vm|pod|by)\b|preemption (notice"
                 r"|signal|event|warning)|spot (instance )?(interruption|termination|reclaim)"
                 r"|\bNODE_?FAIL\b|due to node fail|instances\.preempted|TerminationByKubelet"
                 r"|node is shutting down|termination (is )?(imminent|notice)"
                 r"|interruption (notice|warning)"
                 r"|(instance|node|vm|machine)\b.{0,40}(scheduled for termination|reclaimed)"),
    wide("ended-words", "scheduler_ended", "root", "none", "time limit", "walltime",
         "term_runlimit", "deadlineexceeded", "timelimit", "job killed",
         pattern=r"due to time limit|walltime.{0,40}exceed|exceed\w*.{0,40}(walltime|time limit)"
                 r"|TERM_RUNLIMIT|DeadlineExceeded.{0,60}active|was active on the node longer"),
    wide("sigkill-words", "sigkill_unknown", "secondary", "restart", "signal", "sigkill",
         "exit", "exited", "returncode", "return code", "killed", "status 137", "code 137",
         unless="potential root causes|send(ing)? SIGKILL",
         pattern=r"(\bsignal[ :=(]*"
                 r"(9\b|kill(ed)?\b)|\bSIGKILL\b|exit(ed|s|ing)?( with| from)?( status|[ _]?code\"?"
                 r")?[ :=(]*(-9|137)\b|return ?code[ :=]*-9\b|killed by signal 9"
                 r"|exit status 137|command terminated with exit code 137)"),
    wide("teardown-words", "teardown_secondary", "teardown", "none", "sigterm", "sigint",
         "signal 15", "signal term", "death signal", "shutting down", "driver shutting down",
         "code 143",
         "exitcode", "sighup", "atexit", "disconnect from", "agent shutdown",
         pattern=r"\b(received|caught|got|handling|sending|sent|send)\b.{0,40}\b(SIG(TERM|INT|HUP)"
                 r"|signal[ :=]*(15|2|TERM|INT|HUP)\b|SIGKILL)|death signal|driver shutting down"
                 r"|shutting down (background|workers)|error in atexit|failed to disconnect from"
                 r"|proceeding with agent shutdown|exit(ed)?( with)?( code|code| status)"
                 r"?[ :=]*(143\b|-15\b)|terminated by signal"),
)  # fmt: skip

# Last: what failed for want of memory is better known to the signatures before.
_MEMORY = (
    wide("oom-words", "cuda_oom", "root", "stop", "out of memory", "outofmemory", "out_of_memory",
         pattern=r"out[ _]?of[ _]?memory",
         unless=r"kill|cgroup|java|heap|host|system|cpu|\bram\b|slurm|oom[_-]|errno|os error"),
    wide("host-memory-words", "host_oom", "root", "restart", "memoryerror", "bad_alloc",
         "cannot allocate memory", "defaultcpuallocator", "unable to allocate", "errno 12",
         "heap space",
         unless="cgroup",
         pattern=r"\b\w*MemoryError\b|std::bad_alloc|DefaultCPUAllocator: "
                 r"(can't|not enough)|(fork|clone|malloc|mmap|os error 12|errno 12|OSError)\b"
                 r".{0,60}"
                 r"cannot allocate memory|unable to allocate [\d.]+ [KMGTP]i?B|java heap space"
                 r"|cannot allocate memory\W*(\(os error 12\))?$", weak=True),
)  # fmt: skip

WIDE = (*_GPU, *_HOST, *_NETWORK, *_COMMUNICATION, *_FILES, *_ENDS, *_MEMORY)
