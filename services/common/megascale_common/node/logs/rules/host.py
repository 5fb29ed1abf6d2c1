"""Faults of the host: memory, processors, disks, PCIe.

After Meta's GCM, Azure's HPC health checks and the kernel's own texts.
"""

from __future__ import annotations

from megascale_common.node.logs.signature import text

HOST = (
    text("dimm-cper-ue", "host_dimm_ue", "root", "evict_restart", "multi-bit ECC",
         "multi-bit uncorrectable", "ulti-bit memory error",
         pattern=r"\[Hardware Error\].*multi-bit (uncorrectable )?ECC|ulti-bit memory errors?\b",
         kernel=True),
    text("dimm-cper-ce", "host_dimm_ce", "root", "alert", "single-bit ECC",
         pattern=r"\[Hardware Error\].*single-bit ECC", kernel=True),
    text("dimm-ue", "host_dimm_ue", "root", "evict_restart", "EDAC", "Memory failure: 0x",
         "Uncorrected error", "ncorrected hardware memory error", "ncorrectable memory error",
         "hardware memory corruption", "Uncorrectable ECC", "recovery action for",
         pattern=r"hardware memory corruption|(Memory|DIMM).*Uncorrectable ECC|EDAC .*\b\d+ UE\b"
                 r"|Memory failure: 0x|\bMCE 0x[0-9a-f]+: |Uncorrected error\s*$"
                 r"|[Uu]ncorrected hardware memory|[Uu]ncorrectable memory error",
         unless=r"\bGPU|NVRM", kernel=True),
    text("dimm-ce", "host_dimm_ce", "root", "alert", "EDAC", "orrected memory error",
         "orrected error, no action", "orrected read error", "MEMORY CONTROLLER",
         pattern=r"EDAC .*\b\d+ CE\b|EDAC .*HANDLING MCE MEMORY|\bCorrected memory error"
                 r"|\bCorrected error, no action.*\b(memory|Memory)|\bCorrected read error"
                 r"|MEMORY CONTROLLER \w+_CHANNEL",
         kernel=True),
    text("cper-fatal", "host_hardware_error", "root", "evict_restart", "Hardware Error",
         pattern=r"event severity: fatal", kernel=True),
    text("mce-fatal", "host_hardware_error", "root", "evict_restart", "Machine Check Exception",
         pattern=r"Machine Check Exception: \d+ Bank", kernel=True),
    text("cper", "host_hardware_error", "root", "alert", "Hardware Error",
         pattern=r"event severity: recoverable|Machine [Cc]heck|error from APEI"
                 r"|MC\d+_STATUS\[", kernel=True,
         weak=True),
    text("host-stall", "host_lockup", "root", "alert", "detected stall", "rcu_",
         pattern=r"rcu\w*:? .*detected (expedited )?stalls?|self-detected stall", kernel=True),
    text("kernel-oops", "host_lockup", "root", "evict_restart", "kernel BUG at", "Oops: ",
         "general protection fault",
         pattern=r"kernel BUG at|\bOops: [0-9a-f]{4} \[#\d+\]"
                 r"|(?<!traps: )general protection fault(, |: [0-9a-f]{4} \[#)", kernel=True),
    text("lockup", "host_lockup", "root", "evict_restart", "oft lockup", "hard LOCKUP",
         "ernel panic", "ernel Panic", "BUG: unable to handle",
         "BUG: kernel NULL pointer", kernel=True),
    text("hung-task", "host_hung_task", "root", "alert", "blocked for more than",
         "hung_task_timeout_secs", kernel=True),
    text("host-oom", "host_oom", "root", "restart", "ut of memory: Kill", "oom-kill",
         "out-of-memory handler", "oom_kill event", "OOM Killed", "OOMKilled", ": Out Of Memory",
         "Killed process",
         pattern=r"ut of memory: Kill|oom-kill|out-of-memory handler|oom_kill event"
                 r"|OOM ?Killed(?!\W+false)"
                 r"|task \S+: Out Of Memory|Killed process \d+ \(.*total-vm", kernel=True),
    text("pcie-fatal", "pcie_error", "root", "evict_restart", "AER:", "PCIe Bus Error",
         pattern=r"AER: .*\((Fatal|fatal)\)|Uncorrected \(Fatal\)|Uncorrectable \(Fatal\)",
         kernel=True),
    text("pcie", "pcie_error", "root", "alert", "AER:", "PCIe Bus Error", "pciehp",
         pattern=r"PCIe Bus Error|AER: (?!enabled)|pciehp.*Link Down", kernel=True),
    text("disk-failed", "host_disk_failed", "root", "evict_restart", "ilesystem",
         "Disk failure on", "after reset failure", "after probe failure", "Corruption detected",
         "etadata corruption",
         pattern=r"XFS .*([Cc]orruption (of|detected)|Metadata corruption)"
                 r"|Remounting filesystem read-only|XFS .*Shutting down filesystem"
                 r"|md/raid.*Disk failure on|Disabling device after reset failure"
                 r"|Removing after probe failure", kernel=True),
    text("disk", "host_disk_failed", "root", "alert", "Buffer I/O error", "reset controller",
         "timeout, aborting", "timeout, disable controller", "I/O error, dev",
         "Identify Controller failed", "controller is down; will reset", "aborting reset",
         "timeout, completion polled", "critical medium error", "critical target error",
         "EXT4-fs error", "metadata I/O error", "BTRFS error", "Unrecovered read error",
         "failed command: ", "exception Emask", "FAILED Result: hostbyte", "log I/O error",
         "ext4_end_bio", "sync page write", "Aborting journal on", "JBD2: ",
         kernel=True),
    text("nic-power", "pcie_error", "root", "alert", "insufficient power on the PCIe",
         kernel=True),
    text("nccl-segv", "unknown", "root", "restart", "in libnccl.so",
         pattern=r"segfault at"),
)  # fmt: skip
