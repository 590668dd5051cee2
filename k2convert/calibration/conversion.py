"""The layer pass of rule `gptq` (gptq_pass.py) next to the pipeline of a conversion: its plan, and its thread.

    layer 0 -> layer 1 -> layer 2 -> ...          the layer pass, with a conversion in a thread of its own
                  |          |
               shard 1    shard 2                 the pipeline: a shard is converted when its last layer is done

The layer pass is at most AHEAD layers ahead of the shards, so that few converted layers wait on the disk.

What it has done is in DEST/.k2convert/calibration.work until the ledger has it. A layer's quantized weights are removed
when the last shard that needs them is recorded. If a shard has to be converted again after that, the layer pass begins
with the first layer once more: it makes the same bytes on the same machine.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition, Event
from typing import Any, Final

from k2convert.calibration.layer_files import (
    Calibration,
    LayerResult,
    delete_quantized,
    digest_of_exponents,
    needed_files,
    read_layer,
    write_layer,
)
from k2convert.checkpoint.folders import make_folder
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import InterruptedRun
from k2convert.forward.layer_pass import LayerPart, LayerPass, LayerShards, PassText, layer_ranges
from k2convert.forward.work import PassJob, WorkFolder
from k2convert.hub.client import Hub
from k2convert.hub.ranges import RemoteShards
from k2convert.models import locate_module, read_architecture
from k2convert.models.names import Architecture, Role
from k2convert.plan.plan import ConvertStep, Fp8Step, ShardJob
from k2convert.plan.recipe import Recipe
from k2convert.records.calibration import CalibrationRecord, LayerCalibration
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import Source
from k2convert.text.windows import experts_per_token, held_out

AHEAD: Final = 1
_STATE_BYTES: Final = 2
_PROJECTION_BYTES: Final = 1024  # of the header of a layer's codes
_EXPERT_BYTES: Final = 128  # of what is kept of the decisions in a layer
_CHANNEL_BYTES: Final = 8  # of an exponent as text
_LAYER_SLACK_BYTES: Final = 1 << 16  # of the files of a layer besides
_TOKEN_TENSORS: Final = 3  # f32 [tokens, hidden] of a layer
_UNEVEN: Final = 4  # the busiest experts have so many times the even share
_POLL_SECONDS: Final = 0.2
_LEAVE_SECONDS: Final = 20.0  # a factor of K2's size takes this long, and nothing interrupts it


@dataclass(frozen=True, slots=True)
class ShardNeeds:
    """Layers and tensors that an output shard needs of the layer pass.

    `last` is the last layer that it waits for, -1 if it waits for none. `codes` are the bytes of quantized weights that
    it needs, by layer.
    """

    last: int
    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """A planned calibration. Nothing has been written yet. `needs` are those of each output shard."""

    layer_pass: LayerPass
    source: Checkpoint
    architecture: Architecture
    needs: Mapping[str, ShardNeeds]
    shared_width: int  # inner activations of the widest MLP that is converted and that every token takes, or 0
    fp8_bytes: int  # the most FP8 weights of a layer

    @property
    def held_out_windows(self) -> int:
        """The windows that are kept out of everything that is fitted."""
        return int(held_out(self.layer_pass.text.windows.ids.shape[0]).sum())

    @property
    def fitted_windows(self) -> int:
        """The other windows."""
        return self.layer_pass.text.windows.ids.shape[0] - self.held_out_windows


def plan_calibration(
    text: PassText,
    source: Source,
    *,
    hub: Hub,
    identity: Mapping[str, Any],
    work: WorkFolder,
    shards: Sequence[ShardJob],
) -> CalibrationPlan:
    """Plan a calibration from headers and windows; `shards` are those of the conversion. Raises PlanError.

    `identity` has every field that the results depend on.
    """
    architecture = read_architecture(source.checkpoint)
    num_layers = architecture.num_layers
    ids = text.windows.ids
    needs = {shard.name: shard_needs(shard) for shard in shards}
    states = 2 * ids.size * architecture.hidden_size * _STATE_BYTES * min(num_layers - 1, 2)
    experts = num_layers * architecture.num_experts * _EXPERT_BYTES
    decisions = num_layers * (_CHANNEL_BYTES * architecture.hidden_size + _LAYER_SLACK_BYTES)
    disk_bytes = states + experts + decisions + waiting_bytes(needs.values(), num_layers=num_layers)
    if text.devices == ("cpu",):
        disk_bytes += _scratch_bytes(source.checkpoint, tokens=ids.size, workers=text.threads)
    parts = [LayerPart(source.checkpoint, None, {})] * num_layers
    if source.remote is not None:
        remote = RemoteShards(hub, source.remote, work.downloads)
        parts = [LayerPart(source.checkpoint, remote, of) for of in layer_ranges(source.checkpoint, num_layers)]
    return CalibrationPlan(
        layer_pass=LayerPass(
            text=text,
            num_layers=num_layers,
            hidden_size=architecture.hidden_size,
            work=work,
            job=PassJob({**identity, "layers": num_layers}, text.chunk, source.identities()),
            shards=LayerShards(parts, work.downloads, 0, SILENT),
            disk_bytes=disk_bytes,
            disk_allowed=0,
        ),
        source=source.checkpoint,
        architecture=architecture,
        needs=needs,
        shared_width=max((_shared_width(shard) for shard in shards), default=0),
        fp8_bytes=_fp8_bytes(shards),
    )


def _scratch_bytes(source: Checkpoint, *, tokens: int, workers: int) -> int:
    """Return the disk that layer_tokens.py uses for a layer next to a CPU; an estimate for very uneven experts."""
    architecture = read_architecture(source)
    chosen = tokens * experts_per_token(source)
    at_once = (workers + 1) * _UNEVEN * chosen // max(architecture.num_experts, 1)
    outputs = min(at_once, chosen) * architecture.hidden_size
    inner = chosen * architecture.moe_intermediate_size
    return 4 * (_TOKEN_TENSORS * tokens * architecture.hidden_size + inner + outputs)


def _shared_width(shard: ShardJob) -> int:
    members = (p for step in shard.steps if isinstance(step, ConvertStep) for p in step.members)
    return max((p.num_columns for p in members if p.kind == "down" and p.role is not Role.EXPERTS), default=0)


def _fp8_bytes(shards: Sequence[ShardJob]) -> int:
    sums = Counter[int | None]()
    for step in (step for shard in shards for step in shard.steps if isinstance(step, Fp8Step)):
        module_place = locate_module(step.module)
        sums[None if module_place is None else module_place.layer] += step.num_bytes
    return max(sums.values(), default=0)


def shard_needs(shard: ShardJob) -> ShardNeeds:
    """Return what an output shard needs of a layer pass: every layer that it has tensors of.

    Copied tensors count too: whether smoothing changes them is asked of their layer.
    """
    layers = {-1}
    codes = dict[int, int]()
    for step in shard.steps:
        is_converted = isinstance(step, ConvertStep)
        module = step.members[0].module if is_converted else step.tensor.name.rpartition(".")[0]
        module_place = locate_module(module)  # that of all members: they are of the same MLP
        if module_place is None or module_place.layer is None:
            continue
        layers.add(module_place.layer)
        if is_converted:
            num_bytes = sum(output.num_bytes for output in step.outputs) + _PROJECTION_BYTES * len(step.members)
            codes[module_place.layer] = codes.get(module_place.layer, 0) + num_bytes
    return ShardNeeds(max(layers), codes)


def waiting_bytes(needs: Collection[ShardNeeds], *, num_layers: int) -> int:
    """Return the most bytes of quantized weights that wait at a time.

    While a layer is computed, the codes of a layer before it are there if a shard that needs them is not converted.
    """
    totals: dict[int, int] = {}
    for need in needs:
        for layer, num_bytes in need.codes.items():
            totals[layer] = totals.get(layer, 0) + num_bytes
    most = 0
    for current in range(num_layers):
        waiting = {layer for need in needs if need.last >= current - AHEAD for layer in need.codes if layer <= current}
        most = max(most, sum(totals[layer] for layer in waiting))
    return most


def open_pass(
    plan: CalibrationPlan,
    recipe: Recipe,
    shards: Collection[str],
    *,
    calibrated: CalibrationRecord | None,
    events: Events,
) -> "PassBesideJob | None":
    """Begin or resume the layer pass of a job that has `shards` to convert; None if it is done: `calibrated` says so.

    Begins again if something is damaged that the shards or the next layer need. Raises ResumeError.
    """
    work = plan.layer_pass.work
    if not shards and calibrated is not None:
        if work.folder.exists():
            work.remove()  # the run that wrote the ledger was killed before it could
        return None
    make_folder(work.folder / WORK_FOLDER)
    begun = work.begin(plan.layer_pass.job, events=events)
    needed = {layer for name in shards for layer in plan.needs[name].codes}
    first = work.resume(num_layers=plan.layer_pass.num_layers, also=needed_files(work, needed), events=events)
    if first:
        events.note(f"{work.folder}: resuming: {first} of {plan.layer_pass.num_layers} layers done")
    for layer in set(range(first)) - needed:
        delete_quantized(work, layer)
    return PassBesideJob(plan, recipe, chunk=begun.chunk, first=first, shards=shards)


class PassBesideJob:
    """A layer pass in a thread of its own. Workers of the pipeline wait for it, shard by shard.

    `chunk` windows are computed at a time, as in its first run. The layers before `first` are done. `shards` are the
    output shards that are not recorded yet.
    """

    def __init__(
        self, plan: CalibrationPlan, recipe: Recipe, *, chunk: int, first: int, shards: Collection[str]
    ) -> None:
        self.plan = plan
        self.first = first
        self._recipe = recipe
        self._chunk = chunk
        self._work = plan.layer_pass.work
        self._calibration = Calibration(self._work)
        self._failure: BaseException | None = None
        self._stop = Event()
        self._changed = Condition()  # guards everything below
        self._needs = {name: plan.needs[name] for name in shards}
        self._num_done = first

    @contextmanager
    def running(self, *, space: int, stop: Event, events: Events) -> Generator[None]:
        """Run during the block, which converts shards and returns when `stop` is set; then wait for the layers.

        `space` is what fetched layers may use. Raises what failed first, in the block or in the layer pass.
        """
        self._stop = stop
        with self._calibration:
            thread = threading.Thread(target=self._guard, args=(space, events), name="layers", daemon=True)
            thread.start()
            try:
                yield
                _join(thread)
            except InterruptedRun:  # the layer pass may have stopped the block
                _join(thread, seconds=_LEAVE_SECONDS)
                if self._failure is None:
                    raise
            finally:
                stop.set()
                _join(thread, seconds=_LEAVE_SECONDS)
        if self._failure is not None:
            raise self._failure

    def wait_for(self, shard: str) -> Calibration:
        """Wait until the layers of a shard are done, and return them; raises InterruptedRun if the run stops before."""
        with self._changed:
            last = self._needs[shard].last
            self._wait(lambda: self._num_done > last)
        return self._calibration

    def recorded(self, shard: str) -> None:
        """Note that a shard is recorded, and remove the quantized weights that no other shard needs."""
        with self._changed:
            layers = self._needs.pop(shard).codes.keys() - self._needed()
            self._changed.notify_all()
        for layer in layers:
            self._calibration.delete(layer)

    def finish(self) -> CalibrationRecord:
        """Return the ledger's entry; raises CheckpointError if a file of a layer is damaged."""
        layer_pass = self.plan.layer_pass
        num_layers = layer_pass.num_layers
        results = {number: read_layer(self._work, number) for number in range(num_layers)}
        windows = layer_pass.text.windows
        smoothing = bool(self._recipe.smoothing)
        scaled = {n: exponents for n, result in results.items() if (exponents := result.smoothing()) is not None}
        moe_layers = self.plan.architecture.moe_layers
        return CalibrationRecord(
            texts=windows.texts,
            tokens=self.plan.fitted_windows * windows.ids.shape[1],
            window=windows.ids.shape[1],
            windows=self.plan.fitted_windows,
            dropped_windows=results[num_layers - 1].dropped,
            seed=windows.seed,
            smoothing=smoothing,
            exponents_digest=digest_of_exponents(scaled),
            layers={n: _layer_record(results[n], layer_pass.hidden_size, smoothing=smoothing) for n in moe_layers},
            held_out_windows=self.plan.held_out_windows,
            dense_layers={n: r.gptq for n, r in results.items() if n not in moe_layers and r.gptq is not None},
        )

    def _needed(self) -> set[int]:
        return {layer for need in self._needs.values() for layer in need.codes}

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait, holding the lock, until `is_ready`; raises InterruptedRun if the run stops."""
        self._check_stop()
        while not is_ready():
            self._changed.wait(_POLL_SECONDS)
            self._check_stop()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise InterruptedRun

    def _guard(self, space: int, events: Events) -> None:
        try:
            self._run(space, events)
        except BaseException as error:  # raised again in the thread that converts
            self._failure = error
            self._stop.set()

    def _run(self, space: int, events: Events) -> None:
        from k2convert.calibration.gptq_pass import gptq_pass

        planned = self.plan.layer_pass
        with planned.opened(
            self.first,
            chunk=self._chunk,
            space=space,
            events=events,
            stop=self._stop,
            wait=self._wait_for_shards,
        ) as layer_pass:
            gptq_pass(layer_pass, self._recipe, check_stop=self._check_stop, save=self._save)

    def _wait_for_shards(self, layer: int) -> None:
        """Wait until few converted layers are on the disk."""
        with self._changed:
            self._wait(lambda: all(need.last >= layer - AHEAD for need in self._needs.values()))

    def _save(self, layer: int, result: LayerResult) -> None:
        write_layer(self._work, layer, result)
        with self._changed:
            self._num_done = layer + 1
            is_needed = layer in self._needed()
            self._changed.notify_all()
        if not is_needed:
            self._calibration.delete(layer)


def _join(thread: threading.Thread, *, seconds: float | None = None) -> None:
    """Wait until a thread has ended, at most so long. A signal is handled in between."""
    end = None if seconds is None else time.monotonic() + seconds
    while thread.is_alive() and (end is None or time.monotonic() < end):
        thread.join(_POLL_SECONDS)


def _layer_record(result: LayerResult, hidden_size: int, *, smoothing: bool) -> LayerCalibration:
    counts = dict[int, int]()
    if smoothing:
        counts = dict(sorted(Counter(result.exponents or [0] * hidden_size).items()))
    return LayerCalibration(tokens=result.tokens, exponents=counts, gptq=result.gptq)
