"""What the kernel shows of a machine that does not exist, and of the cgroups of a job there."""

import os
from pathlib import Path

import pytest

from k2convert import machine


def make_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel shows of a machine of 192 cores and 256 GB, to a job without limits."""
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU"):
        monkeypatch.delenv(name, raising=False)
    write(root, "proc/meminfo", "MemTotal: 268435456 kB\nMemAvailable: 262144000 kB\n")
    write(root, "proc/self/status", "VmHWM: 204800 kB\nVmRSS: 102400 kB\nVmSize: 1024000 kB\n")
    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(192)))


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limit_by_version_2(root: Path, folder: str, *, cpus: str, memory: object, used: int, cached: int) -> None:
    cgroup = f"sys/fs/cgroup/{folder}"
    write(root, f"{cgroup}/cpu.max", cpus)
    write(root, f"{cgroup}/memory.max", memory)
    write(root, f"{cgroup}/memory.current", used)
    write(root, f"{cgroup}/memory.stat", f"anon {used - cached}\ninactive_file {cached}\nactive_file 0")


def limit_by_version_1(root: Path, folder: str, *, quota: int, memory: int, used: int, cached: int) -> None:
    write(root, f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_quota_us", quota)
    write(root, f"sys/fs/cgroup/cpu,cpuacct/{folder}/cpu.cfs_period_us", 100_000)
    write(root, f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", memory)
    write(root, f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", used)
    write(root, f"sys/fs/cgroup/memory/{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cached}")
