"""The work folder of a conversion with feedback, DEST/.k2convert/calibration.work: an interrupted one goes on from it.

It is the work folder of a pass (work.py), and holds what a pass does not make:

    feedback-003.json              what was decided in layer 3 (records/calibration.py), if it has experts
    codes-003.safetensors          its converted experts, until every shard that takes them is recorded
    converted-004.safetensors      the hidden states that layer 4 takes in the model as it is converted so far

All files of a layer are complete before its statistics are written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from threading import Lock
from typing import Any, Final

from k2convert.calibrate.layer_codes import LayerCodes
from k2convert.calibrate.layer_statistics import LayerStatistics
from k2convert.calibrate.statistics import Statistics
from k2convert.calibrate.work import WorkFolder
from k2convert.checkpoint.files import dump_json, read_json_file
from k2convert.checkpoint.names import SHARD_SUFFIX, WALK_NAME, WORK_FOLDER
from k2convert.models import locate_module
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.records.calibration import FeedbackLayer

_OPEN_LAYERS: Final = 4


class FeedbackWork(WorkFolder):
    """The work folder of one conversion. `destination` is the folder of its result."""

    def __init__(self, destination: Path) -> None:
        super().__init__(destination / WORK_FOLDER / WALK_NAME)

    def feedback_path(self, layer: int) -> Path:
        """Return the file of what was decided in a layer."""
        return self.folder / f"feedback-{layer:03}.json"

    def codes_path(self, layer: int) -> Path:
        """Return the file of a layer's converted experts."""
        return self.folder / f"codes-{layer:03}{SHARD_SUFFIX}"

    def converted_path(self, layer: int) -> Path:
        """Return the file of the converted model's hidden states that a layer takes."""
        return self.folder / f"converted-{layer:03}{SHARD_SUFFIX}"

    @property
    def gathered_path(self) -> Path:
        """The statistics file of all layers, written when the last one is done."""
        return self.folder / f"statistics{SHARD_SUFFIX}"

    def inputs(self, layer: int) -> tuple[Path, ...]:
        """Return the files that a layer but the first takes: both streams."""
        return (self.hidden_path(layer), self.converted_path(layer))

    def outputs(self, layer: int) -> tuple[Path, ...]:
        """Return the files that say what was found in a layer, and its converted experts."""
        return (self.layer_path(layer), self.feedback_path(layer), self.codes_path(layer))

    def needed(self, codes: Collection[int]) -> dict[int, list[Path]]:
        """Return what is needed of each layer besides its statistics: what was decided, and `codes` of some layers."""
        kept, paths = self._digests(), dict[int, list[Path]]()
        for layer in range(self.num_finished()):
            feedback = [path for path in (self.feedback_path(layer),) if path.name in kept]
            paths[layer] = [*feedback, *([self.codes_path(layer)] if layer in codes else [])]
        return paths

    def write_feedback(self, layer: int, found: FeedbackLayer) -> None:
        """Keep what was decided in a layer."""
        self.write(self.feedback_path(layer), dump_json(found.to_dict()))

    def read_feedback(self, layer: int) -> FeedbackLayer | None:
        """Return what was decided in a layer, None if it has no experts; raises CheckpointError if it is damaged."""
        path = self.feedback_path(layer)
        if not path.exists():
            return None
        self.check(path)
        return FeedbackLayer.from_dict(read_json_file(path))

    def drop_codes(self, layer: int) -> None:
        """Remove a layer's converted experts: every shard has them."""
        self.remove_file(self.codes_path(layer))


class LayerFiles:
    """The statistics of the layers that are done so far, as calibrate.columns.Calibration takes them. Thread-safe."""

    def __init__(self, work: FeedbackWork) -> None:
        self._work = work
        self._open: OrderedDict[int, Statistics] = OrderedDict()
        self._lock = Lock()

    @property
    def path(self) -> Path:
        """Where the files are, for messages."""
        return self._work.folder

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that are done."""
        return tuple(range(self._work.num_finished()))

    @property
    def tokens(self) -> int:
        """The tokens of all windows."""
        return self.file(0).tokens

    def layer(self, number: int) -> LayerStatistics:
        """Return the statistics of a layer that is done; raises CheckpointError."""
        return self.file(number).layer(number)

    def file(self, number: int) -> Statistics:
        """Return the open statistics of a layer that is done; raises CheckpointError."""
        with self._lock:
            if number not in self._open:
                self._open[number] = self._work.read_layer(number)
                if len(self._open) > _OPEN_LAYERS:
                    self._open.popitem(last=False)
            self._open.move_to_end(number)
            return self._open[number]


class CodesFolder:
    """The converted experts of the layers that are done so far. Thread-safe; close it when the shards are written."""

    def __init__(self, work: FeedbackWork) -> None:
        self._work = work
        self._open: dict[int, LayerCodes] = {}
        self._lock = Lock()

    def read(self, module: str) -> Nvfp4Weight:
        """Return a converted projection; raises CheckpointError if its layer is not there or damaged."""
        place = locate_module(module)
        assert place is not None
        assert place.layer is not None
        with self._lock:
            if place.layer not in self._open:
                path = self._work.codes_path(place.layer)
                self._work.check(path)
                self._open[place.layer] = LayerCodes(path)
            codes = self._open[place.layer]
        return codes.read(module)

    def drop(self, layer: int) -> None:
        """Close and remove a layer's codes. No shard may need them any more."""
        with self._lock:
            if (codes := self._open.pop(layer, None)) is not None:
                codes.close()
        self._work.drop_codes(layer)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for codes in self._open.values():
                codes.close()
            self._open.clear()

    def __enter__(self) -> CodesFolder:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
