"""What one sandbox may use, whoever runs in it: programs that are graded, shells and agents.

Invariant: every number bounds; none may be 0 or unlimited. Pure.
"""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Budget:
    """One sandbox's share of the machine."""

    memory_mb: int = 2048
    """Memory: of all processes together where control groups can be had, else the address space of each."""
    disk_mb: int = 256
    """Bytes of all writable folders together, /tmp and /dev/shm included. They are memory."""
    files: int = 65_536
    """Files and folders in them."""
    processes: int = 256
    """Processes and threads."""
    cpu_s: int = 3600
    """CPU seconds of one process."""
    wall_s: float = 86_400.0
    """Seconds that it may live."""
    output_kb: int = 256
    """What one program in it may print."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}; give a finite number above 0")

    @property
    def disk_bytes(self) -> int:
        """`disk_mb` in bytes."""
        return self.disk_mb * 2**20

    def as_rlimits(self) -> dict[str, int]:
        """What each process gets, by the names of `resource`."""
        return {
            "RLIMIT_AS": self.memory_mb * 2**20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.disk_bytes,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_NOFILE": 1024,
            "RLIMIT_CORE": 0,
        }
