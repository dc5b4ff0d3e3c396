"""What a benchmark ran on: commit, device, library versions, and whether something else kept a core busy.

A figure measured beside other work is void: on a CPU plain decoding suffers most, which flatters every speed-up. So the
load is looked at before and after, and a record says what was seen.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BUSY_CORES = 0.5  # of other processes; half a core is more than a desktop at rest takes


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a record was made.

    Args:
        commit: of the source tree that ran, with "+" if it had changes; None outside of one.
        device: name of the GPU, or of the processor.
        threads: that torch computes with, on a CPU.
    """

    commit: str | None
    device: str
    accelerator: str  # "cuda" or "cpu"
    cpu: str
    cores: int
    threads: int
    python: str
    torch: str
    foretell: str
    system: str


def describe(accelerator: str | None = None) -> Machine:
    """This machine.

    Args:
        accelerator: "cuda" or "cpu" as the engine ran; None = no model ran here (a client of a server).
    """
    import torch

    on_gpu = accelerator is not None and accelerator.startswith("cuda")
    processor = _processor()
    return Machine(
        commit=commit_of(Path(__file__).parent),
        device=torch.cuda.get_device_name(0) if on_gpu else processor,
        accelerator="cuda" if on_gpu else "cpu",
        cpu=processor,
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
        foretell=_version("foretell"),
        system=f"{platform.system()} {platform.release()}",
    )


def commit_of(folder: Path) -> str | None:
    """Short commit of the tree that `folder` is in; a "+" behind it means changes that are not committed."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    found = git("rev-parse", "--short=12", "HEAD")
    if not found:
        return None
    return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


@dataclass(frozen=True, slots=True)
class Busy:
    """Processor time that others took, in cores: 1.0 means that one core was not ours."""

    cores: float

    @property
    def voids(self) -> bool:
        """Figures taken beside it mean nothing."""
        return self.cores > BUSY_CORES

    def warning(self, when: str) -> str:
        """For people."""
        return (
            f"{self.cores:.1f} cores were kept busy by other processes {when} the run: these figures are void. "
            "End the other work and run it again"
        )


class Watch:
    """Counts what other processes take of the processors between `start` and `stop`.

    It reads the kernel's own accounting (/proc/stat) and takes our share off. Where there is none, nothing is seen.
    """

    def __init__(self) -> None:
        self._start = _taken()

    def stop(self) -> Busy:
        """What was seen since the start."""
        before, now = self._start, _taken()
        if before is None or now is None or now.wall - before.wall < 0.05:
            return Busy(0.0)
        others = (now.machine - before.machine) - (now.ours - before.ours)
        return Busy(max(0.0, others / (now.wall - before.wall)))


def look(seconds: float = 0.3) -> Busy:
    """What other processes take while we wait."""
    watch = Watch()
    time.sleep(seconds)
    return watch.stop()


@dataclass(frozen=True, slots=True)
class _Taken:
    wall: float
    machine: float  # seconds of all processors that were not idle
    ours: float  # of this process and its children


def _taken() -> _Taken | None:
    path = Path("/proc/stat")
    if not path.exists():
        return None
    # user nice system idle iowait irq softirq steal ...: a stolen second is one that a neighbour took.
    numbers = [int(x) for x in path.read_text().splitlines()[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    used = sum(numbers) - numbers[3] - numbers[4]
    times = os.times()
    ours = times.user + times.system + times.children_user + times.children_system
    return _Taken(time.monotonic(), used / ticks, ours)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "source"
