"""Which capabilities this machine can give to a node."""

from __future__ import annotations

# In the order of their bits, as linux/capability.h numbers them.
_NAMES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *(
        "LINUX_IMMUTABLE",
        "NET_BIND_SERVICE",
        "NET_BROADCAST",
        "NET_ADMIN",
        "NET_RAW",
        "IPC_LOCK",
        "IPC_OWNER",
    ),
    *(
        "SYS_MODULE",
        "SYS_RAWIO",
        "SYS_CHROOT",
        "SYS_PTRACE",
        "SYS_PACCT",
        "SYS_ADMIN",
        "SYS_BOOT",
        "SYS_NICE",
    ),
    *(
        "SYS_RESOURCE",
        "SYS_TIME",
        "SYS_TTY_CONFIG",
        "MKNOD",
        "LEASE",
        "AUDIT_WRITE",
        "AUDIT_CONTROL",
        "SETFCAP",
    ),
    *("MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF"),
    "CHECKPOINT_RESTORE",
)


def withheld(status: str) -> list[str]:
    """Capabilities that the bounding set of a /proc/PID/status text lacks.

    A machine that lacks one can't give it away: asking for all of them fails the start of a container.
    """
    for line in status.splitlines():
        if line.startswith("CapBnd:"):
            bits = int(line.split()[1], 16)
            return [name for at, name in enumerate(_NAMES) if not bits >> at & 1]
    return []
