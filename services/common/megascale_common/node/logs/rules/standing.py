"""Standing wordings that texts of one cause share, beyond those of ``wide``: tried last.

After the kernel's own messages (4.18 to 6.12), NVRM of drivers 470 to 580, systemd, kubelet, Ray,
Open MPI 4 and 5, vLLM and SGLang.
"""

from __future__ import annotations

from megascale_common.node.logs.signature import wide

_DEVICES = (
    wide("gpu-says-ecc", "gpu_ecc_uncorrectable", "root", "evict_restart", "uncorrectable memory",
         "uncorrectable error", "sram uncorrectable", "dram uncorrectable",
         unless=r"\b(no|0) (\w+ )?uncorrectable|non-fatal|aer|pcie|uncorrectable errors?\W+0\b",
         pattern=r"\b(GPU|NVRM)\b.{0,80}\buncorrectable (memory |ecc )?errors?"
                 r"|\b[SD]RAM uncorrectable\W+[1-9]", kernel=True),
    wide("gpu-says-remap", "gpu_row_remap", "root", "evict_restart", "row remapping",
         pattern=r"failed row remapping|row remapping (has )?(failed|failure)", kernel=True),
    wide("gpu-register", "gpu_fallen_off_bus", "root", "alert", "bad register read",
         "gpu is not accessible", "gpu is not responding", "gpu disappeared", "rev ff",
         pattern=r"NVRM:.*bad register read|\bGPUs? (\S+ )?(is|are) (not (accessible|responding)"
                 r"|inaccessible)|\bGPU \S*\s*disappeared|\bNVIDIA\b.*\(rev ff\)", kernel=True),
    wide("gsp-died", "gsp_rpc_timeout", "root", "evict_restart", "gsp", "rpcsendmessage",
         pattern=r"NVRM:.*\bGSP\b.*(crash|time(d )?out|not respond|hung|died|halt)"
                 r"|NVRM:.*rpcSendMessage failed with status 0x0*65\b", kernel=True),
    # NV_ERR_GPU_IS_LOST
    wide("gpu-lost-status", "gpu_fallen_off_bus", "root", "evict_restart", "rpcsendmessage",
         "rmstatus", pattern=r"NVRM:.*\bstatus 0x0*f\b", kernel=True),
    wide("gsp-start", "gpu_init_failed", "root", "evict_restart", "gsp firmware", "gsp-rm",
         pattern=r"NVRM:.*(failed|unable|cannot|could not).{0,60}\bGSP(-RM| firmware)",
         kernel=True),
    wide("gpu-hung", "gpu_channel_error", "root", "alert", "gpu hung", "gpu hang",
         pattern=r"\bGPU (hung\b|hang\b.{0,40}(ecode|detected|recover))"),
    wide("uvm-fatal", "gpu_mmu_fault", "root", "restart", "global fatal error", "mmu fault",
         pattern=r"uvm.*global fatal error|\bMMU fault\b", kernel=True),
    wide("nvlink-kernel", "nvlink_error", "root", "alert", "nvlink", "nvswitch",
         unless=r"registered|being initialized|unregistered|fully initialized",
         pattern=r"nvidia-(nvlink|nvswitch)\d*: .*(unable|fail|error|fault|fatal|timed out)"
                 r"|\bNVLink\b ?\W{0,2}(link )?\d* ?(is |went |has gone )?(down|inactive)\b"
                 r"|nvlink.{0,60}\ball links are inactive"
                 r"|nvlink.{0,60}(replay|recovery|crc|fatal|minor|data).{0,20} errors?\b.{0,40}"
                 r"(detected|exceed|increas)", kernel=True),
    wide("nvswitch-fatal", "nvlink_error", "root", "evict_restart", "nvswitch",
         pattern=r"NVSwitch \d+ fatal error", kernel=True),
    wide("fabric-waits", "fabric_manager_failure", "root", "alert", "fabric",
         pattern=r"fabric (state|initialization)\b.{0,40}(not (start|complete|register|run)|fail"
                 r"|in progress|but is not)"),
    wide("gpu-absent", "gpu_init_failed", "root", "restart", "devices available",
         "gpu devices", "cuda device", "initialize the nvidia", "initialise the nvidia",
         "lazily at initialization", "cuda libraries",
         "is not loaded", "your machine only has", "no supported gpu", "bound to vfio",
         "could not find cuda", "nvidia-smi", "cuda devices", "invalid device id", "/dev/nvidia",
         "device_count", unless="initialize backend",
         pattern=r"failed to initiali[sz]e the NVIDIA (GPU|graphics|device|kernel)"
                 r"|only \d+ devices available, \d+ requested|no visible (GPU|CUDA) devices"
                 r"|CUDA call failed lazily at initialization|error loading CUDA libraries"
                 r"|deserialize object on (a )?CUDA device|NVIDIA driver\b.{0,40}is not loaded"
                 r"|but your machine only has|no supported GPU|NVRM:.*bound to vfio"
                 r"|nvidia-smi\b.{0,60}(has failed|command not found|not found in|returned non)"
                 r"|invalid device id|no (NVIDIA|CUDA) devices?\b.{0,20}(found|visible|present)"
                 r"|(no such file|not found|cannot open|unable to open).{0,60}/dev/nvidia"
                 r"|/dev/nvidia\S*.{0,40}(no such file|permission denied|not found)"
                 r"|(CUDA|GPU)\b.{0,60}device_count\(\) (is|returned|==) 0"),
    wide("gpu-taken", "gpu_busy", "root", "restart", "in use by", "gpu is busy",
         "device is busy", "resource busy", "device or resource busy",
         pattern=r"\bGPU\b.{0,60}(currently )?in use by (one or more|other|another)"
                 r"|\b(GPU|CUDA|NVIDIA|nvidia\d*)\b.{0,60}(device or )?resource busy"
                 r"|\b(GPU|CUDA device)( \d+)? is busy"),
    wide("driver-call", "driver_mismatch", "root", "stop", "installed cuda driver",
         "cuda driver version", "newer cuda driver", "libcuda", "ptx version",
         pattern=r"not supported in the installed CUDA driver|requires? a newer (CUDA|NVIDIA) "
                 r"driver|unsupported \.?(ptx )?version|PTX version \S+ .{0,30}not support"),
    wide("cache-oom", "cuda_oom", "root", "stop", "cache blocks", "free memory on device",
         "mem-fraction-static", "kv cache", "gpu memory", "gpu_memory_utilization",
         pattern=r"no available memory for the cache blocks|free memory on device.{0,80}less than"
                 r"|not enough memory.{0,40}mem-fraction|KV cache\b.{0,60}(larger than|exceeds?)"
                 r".{0,40}available|(insufficient|ran out of|exhausted) (the )?GPU memory"),
    wide("nccl-timeout", "collective_timeout", "secondary", "restart", "timeout", "timed out",
         pattern=r"\b[nhr]ccl[ -]?(operations?|collectives?|work)? ?(timeouts?|timed out)\b"
                 r"(?![ _]?(\(|=|:? ?\d|sec|value|of \d|to \d|set|env))",
         unless=r"NCCL_\w+"),
    wide("cupti-words", "profiler_conflict", "root", "alert", "cupti_error", "dcgm_st_in_use",
         "profil",
         pattern=r"CUPTI_ERROR_\w+|DCGM_ST_IN_USE|profiling module.{0,40}in use"
                 r"|(another|other) (profiler|profiling|tool).{0,40}(active|running|attached"
                 r"|in use|profiling)|profil\w+.{0,40}(in use by another|already (in use|active))"
                 r"|only one profil\w+ .{0,40}(at a time|allowed)"),
    wide("link-changed", "rdma_link_flap", "root", "alert", "link state changed", "link down",
         "nic link", "lost link", "phy state", "physical state", "port state",
         pattern=r"\b(ib|mlx|eth|en[pos]|roce|bond|hsn|rdma)\w*\b.*link state changed to down"
                 r"|(lost link|link down)\b.{0,40}\b(port|interface|hca|nic|mlx\w*|ib\w*)\b"
                 r"|\b(phy|physical|port) state\W+(\w+ )?(down|polling|disabled)\b", kernel=True),
    wide("nic-alive", "rdma_device_fatal", "root", "alert", "reset is required",
         "keep alive watchdog", "trigger reset", "admin queue", "transmit queue",
         pattern=r"\b(efa|ena)\b.*(reset is required|keep alive watchdog|trigger reset"
                 r"|admin\w* queue.*(timeout|error))|transmit queue \d+ timed out", kernel=True),
    wide("mr-words", "rdma_mr_limit", "root", "restart", "ibv_reg", "reg_mr", "mr_reg", "regmr",
         "register mr", "memory region", "register memory", "gpu mr", "umem get failed",
         "create mr", "allocate mr",
         unless="cannot allocate|cuda|errno: 12|code: 12",
         pattern=r"\b(ibv_(exp_)?reg_\w*|fi_mr_reg\w*|reg_?mr\w*|\w*mr_reg\w*)\b.{0,160}"
                 r"(fail|error)|(fail|unable|could not|couldn't)\w*.{0,30}(regist|creat|alloc)\w+"
                 r".{0,30}(\bMRs?\b|memory (region|0x))|umem get failed"),
    # A path with one slash is the name of shared memory.
    wide("shm-name", "shm_attach_failed", "root", "restart", "file exists",
         pattern=r"File ?Exists(Error)?\b.*'/[^/']+'\s*$"),
    wide("memlock-words", "memlock_limit", "root", "stop", "ulimit -l", "locked memory",
         "memlock", "locked-in-memory",
         pattern=r"(check|raise|increase|set|see|insufficient|exceed\w*|too (low|small)).{0,60}"
                 r"(ulimit -l|memlock|locked[- ]memory|locked-in-memory)"
                 r"|(memlock|locked[- ]memory|locked-in-memory)\b.{0,60}(limit (is )?(too|\w*reach"
                 r"|\w*exceed)|too (low|small)|insufficient)"),
    wide("dimm-ue-reported", "host_dimm_ue", "root", "evict_restart", "bus_mceerr_a", "mceerr",
         pattern=r"\bBUS_MCEERR_A[RO]\b", kernel=True),
    wide("dimm-ce-reported", "host_dimm_ce", "root", "alert", "soft-offlining", "soft offline",
         "ce threshold", "corrected error threshold",
         pattern=r"soft-offlining pfn|soft[_ ]offline: 0x|(CE|corrected error) threshold"
                 r"( \w+)? (exceed|reach)", kernel=True),
    wide("board-nmi", "host_hardware_error", "root", "alert", "pci system error",
         "nmi: iock", "package temperature above", "thermal trip",
         pattern=r"NMI: (PCI system error|IOCK error)|thermal trip", kernel=True),
    wide("memory-short", "host_oom", "root", "restart", "oom_reaper", "failcnt",
         "page allocation failure", "memory budget", "memory.max", "kubernetes memory",
         "memory cgroup",
         pattern=r"Memory cgroup (stats for|out of mem)|oom_reaper: reaped"
                 r"|memory: usage \d+kB, limit \d+kB, failcnt [1-9]"
                 r"|page allocation failure: order|exceeded \d+% memory budget", kernel=True,
         weak=True),
)  # fmt: skip

_RUNS = (
    wide("differ-words", "config_version_drift", "root", "stop", "version mismatch",
         "different versions",
         pattern=r"version mismatch: the cluster was started|NCCL version mismatch"
                 r"|different versions of .{0,40}(across|between|on) (the )?(ranks|nodes|workers"
                 r"|hosts)"),
    wide("duplicate-words", "config_duplicate_gpu", "root", "stop", "both on cuda",
         "same gpu", "same device", "same cuda", "duplicate gpu",
         pattern=r"rank \d+ and rank \d+ (are )?(both )?on (the same )?(CUDA|GPU|device)"
                 r"|duplicate GPU|(multiple|two|several|different) (ranks|processes) .{0,40}"
                 r"(the )?same (GPU|CUDA device|device)\b"),
    wide("port-words", "port_in_use", "root", "restart", "attempting to bind", "failed to bind",
         "unable to bind", "cannot bind", "already in use", "already allocated", "errno: 98",
         "bind failed", "errno 98", "errno 48",
         pattern=r"(errno|code)\W{1,3}-?(98|48)\b|port \S* ?is already (in use|allocated)"
                 r"|(failed|unable|cannot|could not) (to )?bind (to|on) .{0,60}(port|:\d+|address)"
                 r"|attempting to bind on address"),
    wide("rendezvous-shut", "rendezvous_closed", "secondary", "restart", "rendezvous",
         pattern=r"(rendezvous|rdzv)\b.{0,80}\b(is |been |was |marked as |already )(closed"
                 r"|shut ?down)|closed rendezvous|removed from the rendezvous"),
    wide("start-words", "rendezvous_timeout", "root", "restart", "running ray instance",
         "daemons", "tasks to start", "trying to connect", "tcp connection to",
         "failed to join", "connection to store", "connect to the head", "unable to reach",
         "could not connect", "unable to connect", "not resolve", "unknown host", "resolve host",
         "retrieve the address",
         unless=r"http|huggingface|wandb|pypi|proxy|socket\.cpp|endpoint url|docker|dbus|s3\b",
         pattern=r"any running ray instance|reliably start one or more daemons"
                 r"|timed out waiting for tasks to start|timed out trying to connect"
                 r"|complete a TCP connection to another|(workers|nodes|ranks|hosts|peers)"
                 r"\b.{0,20}failed to join|connection to store timed|(could not|unable to|cannot"
                 r"|failed to) (resolve|connect to) .{0,20}\b(host|hostname|master|node|rank"
                 r"|head|coordinator|scheduler|store|GCS)\b|unknown host\b"
                 r"|addresses of \(.*\) cannot be retrieved", weak=True),
    wide("peer-died", "peer_closed_secondary", "secondary", "none", "has closed connection",
         "node has died", "nodediederror", "marked dead", "missed too many heartbeats",
         "connection to peer", "peer is gone", "remote host", "got eof", "unexpected eof",
         pattern=r"peer \S+ has closed connection|because its node has died|NodeDiedError"
                 r"|\bnode\b.{0,80}marked dead|missed too many heartbeats"
                 r"|(lost|broken) connection to (peer|rank|worker|node)"
                 r"|closed by (the )?remote (host|peer|side|end)"),
    wide("files-reported", "storage_write_failed", "root", "restart", "datanodewithstorage",
         "datanodeinfowithstorage", "ephemeral-storage", "ephemeral storage", "diskpressure",
         "disk pressure",
         pattern=r"DatanodeInfoWithStorage.{0,80} (are|is) bad|low on resource: ephemeral"
                 r"|ephemeral[- ]storage.{0,40}exceed|exceed\w*.{0,40}ephemeral[- ]storage"
                 r"|\bDiskPressure\b"),
    wide("service-lost", "storage_unreachable", "root", "alert", "operations using this service",
         "@o2ib", "@tcp",
         pattern=r"in progress operations using this service"
                 r"|(timed out|lost|unreachable|failed)\b.{0,80}@(o2ib|tcp)\d*\b"),
    wide("mount-timed-out", "storage_unreachable", "root", "alert", "errno 110", "errno 121",
         "errno 112", "errno 103", "errno 107", "errno 108",
         pattern=r"errno (110|112|103|107|108)\b.{0,60}: ?['\"]?/"),
    wide("ended-by", "scheduler_ended", "root", "none", "specified deadline", "term_owner",
         "term_admin", "not requeued because",
         pattern=r"longer than specified deadline|TERM_(OWNER|ADMIN)"
                 r"|not requeued because: timed[- ]out"),
    wide("moved-by", "scheduler_preempted", "root", "restart", "node shutdown", "taintmanager",
         "disruptiontarget", "preempt", "evicted",
         pattern=r"imminent node shutdown|TaintManagerEviction|DeletionByTaintManager"
                 r"|EvictionByEvictionAPI|\bPreempt(ed|ing)\b.{0,60}(priority|accommodate|workload"
                 r"|by)\b"),
    wide("killed-by", "sigkill_unknown", "secondary", "restart", "status=9", "code=killed",
         pattern=r"status=9/KILL"),
    wide("ended-others", "teardown_secondary", "teardown", "none", "status=15", "commabort",
         "job terminated normally", "job  terminated normally", "exited due to process",
         "job has been aborted", "aborting job", "job aborted", "abort(",
         pattern=r"status=15/TERM|ncclCommAbort|primary job +terminated normally"
                 r"|has exited due to process rank|the job has been aborted|job (step )?aborted"
                 r"|aborting job"),
)  # fmt: skip

STANDING = (*_DEVICES, *_RUNS)
