"""What a pass or a walk will need, here or on a machine that is not here: memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from k2convert.checkpoint.index import Checkpoint
from k2convert.cli import console
from k2convert.cli.options import parse_device
from k2convert.errors import CalibrationError, PlanError
from k2convert.job.locations import Source
from k2convert.job.resources import (
    THREADS_PER_GPU,
    available_memory,
    check_memory,
    choose_devices,
    gpu_memory,
    layer_threads,
    peak_bytes,
)
from k2convert.models import vocabulary_size
from k2convert.models.config import max_positions

if TYPE_CHECKING:
    from k2convert.calibrate.calibration import CalibrationPlan
    from k2convert.calibrate.cost import Time
    from k2convert.calibrate.sizes import Memory, PassSize
    from k2convert.calibrate.text import Windows
    from k2convert.fit.gpus import Gpu

DAY_SECONDS: Final = 86400
MAX_HOURS: Final = 12


@dataclass(frozen=True, slots=True)
class Computer:
    """What computes: this machine's devices, or one `gpu` or some CPU cores that are `elsewhere`."""

    devices: tuple[str, ...]
    threads: int
    gpu: Gpu | None = None
    elsewhere: str = ""

    @property
    def planned(self) -> tuple[str, ...]:
        """The devices that a job here is planned for."""
        return ("cpu",) if self.elsewhere else self.devices

    @property
    def gpu_bytes(self) -> int:
        """The whole memory of the smallest GPU, 0 without one."""
        return gpu_memory(self.devices)[1] if self.gpu is None else self.gpu.memory_bytes


def choose_computer(name: str, *, dry_run: bool) -> Computer:
    """Return the computer that --device names; raises BadParameter for one elsewhere without a dry run, PlanError."""
    device, gpu, cores = parse_device(name)
    if device is None and not dry_run:
        raise typer.BadParameter(f"--device {name}: expected auto, cpu or cuda; other machines only with --dry-run")
    if gpu is not None:
        from k2convert.fit.gpus import find_gpu

        found = find_gpu(gpu)
        if found.flops is None or found.bandwidth is None:
            raise PlanError(f"--device {found.name}: its data sheet does not say its speed. Use another GPU.")
        return Computer(("cuda:0",), THREADS_PER_GPU, found, f"one {found.title}")
    if cores is not None:
        return Computer(("cpu",), cores, None, f"{cores} core{'s' if cores > 1 else ''}")
    devices = choose_devices(device or "auto")
    return Computer(devices, layer_threads(devices))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a pass or a walk of `size` will need. `main` is the memory of the whole process."""

    source: Checkpoint
    size: PassSize
    is_walk: bool
    computer: Computer
    memory: Memory

    def main_bytes(self) -> int:
        """The memory of the whole process. Ask before anything is measured: that takes memory too."""
        return peak_bytes() + self.memory.main

    def check(self, place: str, *, needed: int) -> None:
        """Refuse if this machine, or the GPU that is not here, lacks memory; raises PlanError."""
        gpu = self.computer.gpu
        if not self.computer.elsewhere:
            check_memory(place, needed=needed, available=available_memory() + peak_bytes())
        free = gpu_memory(self.computer.devices)[0] if gpu is None else gpu.memory_bytes
        check_memory(place, needed=self.memory.gpu, available=free, of_gpu=True)

    def time(self, *, disk_bytes: int = 0) -> Time:
        """Measure or compute the time. `disk_bytes` more are read and written."""
        from k2convert.calibrate.cost import Time, computed_time, measured_time

        if self.size.num_layers == 0:
            return Time(0.0, 0.0)
        gpu = self.computer.gpu
        if gpu is None or gpu.flops is None:
            return measured_time(self.source, self.size, is_walk=self.is_walk)
        return computed_time(
            self.source, self.size, is_walk=self.is_walk, gpu=gpu, flops=gpu.flops, disk_bytes=disk_bytes
        )

    def memory_lines(self, needed: int) -> list[str]:
        """Say what memory is needed, and what is there."""
        gpu, text = self.computer.gpu, f"memory: needs about {console.format_bytes(needed)}"
        lines = [text if self.computer.elsewhere else f"{text}, available {console.format_bytes(available_memory())}"]
        if self.memory.gpu:
            free = gpu_memory(self.computer.devices)[0] if gpu is None else gpu.memory_bytes
            word = "free" if gpu is None else f"{gpu.title} has"
            needs = console.format_bytes(self.memory.gpu)
            lines.append(f"memory of the GPU: needs about {needs}, {word} {console.format_bytes(free)}")
        return lines

    def time_line(self, time: Time, *, of: str = "") -> str:
        """Say how long it takes, and where that comes from."""
        elsewhere, span = self.computer.elsewhere, console.format_span(time.least, time.most)
        if not elsewhere:
            return f"time{of}: {span}, an estimate from one expert on this machine{self._advice(time)}"
        if self.computer.gpu is not None:
            source = "its data sheet and a disk of 0.5 to 5 GB/s"
            return f"time{of} on {elsewhere}: {span}, computed from {source}, not measured"
        line = f"time{of} on {elsewhere}: {span}, computed from one core here, not measured{self._advice(time)}"
        if time.alone:
            alone = console.format_span(time.alone, time.alone)
            line += f"\none core's work, however many there are: {alone}, the corrections of the experts' inputs"
        return line

    def _advice(self, time: Time) -> str:
        return "; use a GPU" if self.size.on_cpu and time.middle > DAY_SECONDS else ""

    def document(self, time: Time, needed: int) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "seconds": [round(time.least), round(time.most)],
            "memory_bytes": needed,
            "gpu_memory_bytes": self.memory.gpu,
            "computed_for": self.computer.elsewhere or None,
        }


def forecast(plan: CalibrationPlan, computer: Computer, *, layers: int) -> Forecast:
    """Count what the last `layers` layers of a calibration need."""
    from k2convert.calibrate.sizes import PassSize, pass_memory, read_sizes, walk_memory

    windows, is_walk = plan.text.windows.ids.shape, plan.needs is not None
    size = PassSize(windows[0], windows[1], plan.text.chunk, computer.devices, computer.threads, layers)
    held = (walk_memory if is_walk else pass_memory)(read_sizes(plan.source), size)
    return Forecast(plan.source, size, is_walk, computer, held)


def read_texts(source: Source, files: Sequence[Path], *, tokens: int, window: int, seed: int) -> Windows:
    """Read texts with the source's tokenizer, and token ids, in windows that the model's positions allow."""
    from k2convert.calibrate.text import read_windows  # a run without a text needs no tokenizers

    return read_windows(
        files,
        tokenizer=source.checkpoint.folder,
        vocab_size=vocabulary_size(source.checkpoint),
        tokens=tokens,
        window=min(window, max_positions(source.checkpoint.config) or window),
        seed=seed,
    )


def check_time(time: Time, *, source: str, yes: bool) -> None:
    """Refuse a pass of more than half a day, unless the user agreed; raises CalibrationError."""
    if time.middle > MAX_HOURS * 3600 and not yes:
        raise CalibrationError(
            f"{source}: the pass would take {console.format_span(time.least, time.most)} on this machine, more than "
            f"{MAX_HOURS} hours. Use a machine with a GPU, or fewer tokens, or repeat the command with --yes."
        )
