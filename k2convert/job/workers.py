"""The convert stage of a job: a shard is converted by this process, or by a node of a cluster, and recorded here."""

from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event

from k2convert.hub.branch import branch_name
from k2convert.job import machine
from k2convert.job.calibration import check_norms
from k2convert.job.feedback import LayerWalk
from k2convert.job.prepare import Job
from k2convert.job.ray import Cluster, NodeTask
from k2convert.job.room import Item
from k2convert.job.shard import ShardTask, convert_shard
from k2convert.job.uploads import Uploads
from k2convert.records.events import Events
from k2convert.records.journal import Journal
from k2convert.records.shard_record import ShardRecord


@dataclass(frozen=True, slots=True)
class Workers:
    """What the workers of one run share. `devices` has a device for each; `walk` is what shards wait for, if any."""

    job: Job
    journal: Journal
    records: dict[str, ShardRecord]
    events: Events
    stop: Event
    threads: machine.Threads
    devices: SimpleQueue[str]
    walk: LayerWalk | None

    def convert(self, item: Item) -> None:
        """Convert a shard and record it."""
        job, calibration = self.job, self.job.calibration
        if self.walk is not None:
            self.walk.wait_for(item.name)
            calibration = self.walk.calibration
        device = self.devices.get()
        try:
            if job.source.remote is not None and calibration is not None:
                check_norms(calibration.statistics, job.source.checkpoint, folder=job.downloads, shards=item.sources)
            task = self._task(item.name, device=device)
            task = replace(task, calibration=calibration)
            record = convert_shard(task, threads=self.threads, events=self.events, stop=self.stop)
        finally:
            self.devices.put(device)
        self.journal.record(record)
        self.records[item.name] = record
        if self.walk is not None:
            self.walk.recorded(item.name)
        self.events.shard_finished(item.name)

    def convert_on_node(self, cluster: Cluster, uploads: Uploads | None, item: Item) -> None:
        """Have a node convert a shard and, for the Hub, fetch and send it; record it here."""
        job, limits = self.job, self.job.limits
        task = self._task(item.name, device=limits.devices[0])
        task = replace(
            task,
            source_folder=task.source_folder.absolute(),
            destination=task.destination.absolute(),
            calibration=job.calibration,
        )
        sizes = (sum(limits.source_bytes.get(s, 0) for s in i.sources) + i.output_bytes for i in job.items)
        branch = "" if job.target is None else branch_name(job.digest)
        work = NodeTask(task, job.source.remote, job.target, branch, max(sizes))
        result = cluster.convert(work, stop=self.stop, events=self.events)
        self.records[item.name] = result.record
        if uploads is None:
            self.journal.record(result.record)
        else:
            uploads.adopt(item.name, result.documents)
        outputs = task.shard.outputs
        self.events.progress(bytes_in=task.shard.bytes_in, bytes_out=task.shard.data_bytes, tensors=len(outputs))
        self.events.note(f"node {result.node}: {item.name}")
        self.events.shard_finished(item.name)

    def _task(self, name: str, *, device: str) -> ShardTask:
        job = self.job
        shard = next(shard for shard in job.plan.jobs if shard.name == name)
        headers = job.source.checkpoint.headers
        return ShardTask(
            shard=shard,
            recipe=job.plan.recipe,
            source_folder=job.source.checkpoint.folder if job.source.remote is None else job.downloads,
            destination=job.destination.folder,
            device=device,
            fingerprint=job.digest,
            header_digests={source: headers[source].digest for source in shard.source_shards},
            inflight_bytes=machine.inflight_bytes(uses_hub=job.uses_hub) // job.limits.workers,
            for_upload=job.target is not None,
            kept=None if job.source.pruning is None else job.source.pruning.kept,
            suffix=self.journal.suffix,
        )
