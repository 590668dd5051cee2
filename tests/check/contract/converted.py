"""Conversions to check the contract on: the kinds that must pass, and how to break a copy of one."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from k2convert.check.contract import check_result
from k2convert.check.contract.result import read_result
from k2convert.check.contract.scan import scan_shards
from k2convert.check.results import ContractReport, RuleResult, ValidationReport, Verdict
from k2convert.check.validate import validate_checkpoint
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import CheckpointLayout
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint


class Kind(NamedTuple):
    """How a good checkpoint is converted. `rule` is plain unless the choice of scales matters."""

    layout: str
    source: str
    activations: str
    rule: str = "max"

    def __str__(self) -> str:
        return "-".join(self)

    @property
    def recipe(self) -> dict[str, str]:
        return {"layout": self.layout, "activations": self.activations, "rule": self.rule}


GOOD = [
    Kind("modelopt", "thinking", "w4a4"),
    Kind("modelopt", "thinking", "w4a16"),
    Kind("modelopt", "k2.5", "w4a4"),
    Kind("modelopt", "k2.5", "w4a16"),
    Kind("modelopt", "reap", "w4a4"),
    Kind("modelopt", "thinking", "w4a4", "mse"),
    Kind("compressed-tensors", "reap", "w4a16"),
    Kind("compressed-tensors", "thinking", "w4a4"),
    Kind("compressed-tensors", "thinking", "w4a16"),
    Kind("compressed-tensors", "k2.5", "w4a16"),
    Kind("compressed-tensors", "k2.5", "w4a4"),
]


@dataclass(frozen=True, slots=True)
class Converted:
    """A finished conversion and its source."""

    kind: Kind
    folder: Path
    source: Path

    @property
    def names(self) -> CheckpointLayout:
        return LAYOUTS[self.kind.layout]

    @property
    def layers(self) -> str:
        return "language_model.model.layers" if self.kind.source == "k2.5" else "model.layers"

    def expert(self, layer: int, expert: int, projection: str) -> str:
        return f"{self.layers}.{layer}.mlp.experts.{expert}.{projection}_proj"

    def check(self) -> ContractReport:
        return check(self.folder, source=self.source)


def check(
    folder: Path, *, source: Path | None = None, errors: Mapping[str, WeightMetrics] | None = None
) -> ContractReport:
    """Scan a folder and check all rules, against a source if there is one."""
    result = read_result(folder, source=None if source is None else open_checkpoint(source))
    return check_result(result, scan_shards(result), errors=errors)


def on_bytes(apply: Callable[[Any], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Change the codes uint8 [N, K], which are in `tensor`, in place."""

    def change_them(tensor: torch.Tensor) -> torch.Tensor:
        apply(tensor.view(torch.uint8))
        return tensor

    return change_them


def validate(converted: Converted, *, with_source: bool = True, **options: Any) -> ValidationReport:
    source = open_checkpoint(converted.source) if with_source else None
    return validate_checkpoint(folder=converted.folder, source=source, **options)


def copy_of(converted: Converted, folder: Path) -> Converted:
    """Copy the folder, to break it. The source is shared and must not change."""
    shutil.copytree(converted.folder, folder)
    return Converted(converted.kind, folder, converted.source)


def seal(folder: Path) -> None:
    """Write the shards' current hashes into the ledger, so that rule 19 does not report changed bytes."""
    path = folder / "k2convert.json"
    ledger = json.loads(path.read_text())
    for shard in folder.glob("*.safetensors"):
        if shard.name in ledger["shards"]:
            raw = shard.read_bytes()
            ledger["shards"][shard.name] |= {"blake3": blake3(raw).hexdigest(), "bytes": len(raw)}
    path.write_text(json.dumps(ledger))


def verdicts(report: ContractReport) -> dict[int, Verdict]:
    """The rules that neither passed nor were skipped."""
    return {r.number: r.verdict for r in report.rules if r.verdict in (Verdict.FAIL, Verdict.WARN)}


def only(report: ContractReport, number: int, verdict: Verdict = Verdict.FAIL) -> RuleResult:
    """Return the result of rule `number`, the only rule that may have found something.

    Elsewhere rule 5 is ignored, and rule 8 may say that the totals differ, but may not name a tensor.
    """
    relevant = {n: v for n, v in verdicts(report).items() if n == number or n not in (5, 8)}
    totals = report.rules[7]
    if number != 8 and totals.verdict is Verdict.FAIL:
        assert [(o.name, "expected" in o.problem) for o in totals.offenders] == [(report.folder, True)]
    assert relevant == {number: verdict}, [(r.number, r.offenders) for r in report.rules if r.number in relevant]
    return report.rules[number - 1]


def change(converted: Converted, apply: Callable[[SmallCheckpoint], object]) -> None:
    """Change tensors, and update shards, index and the ledger's hashes."""
    damage.edit_checkpoint(converted.folder, apply)
    seal(converted.folder)


def change_tensor(converted: Converted, name: str, apply: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    damage.edit_tensor(converted.folder, name, apply)
    seal(converted.folder)


def set_byte(tensor: torch.Tensor, index: int, value: int) -> torch.Tensor:
    tensor.view(torch.uint8).view(-1)[index] = value
    return tensor


def next_number(scalar: torch.Tensor) -> torch.Tensor:
    """The next FP32 number, away from zero."""
    return (scalar.view(torch.int32) + 1).view(torch.float32)


def on_all(
    apply: Callable[[torch.Tensor], torch.Tensor], *ends: str, part: str = ".experts."
) -> Callable[[SmallCheckpoint], None]:
    """Change all tensors of experts whose names have one of these ends."""

    def edit(checkpoint: SmallCheckpoint) -> None:
        for name, tensor in checkpoint.tensors().items():
            if part in name and name.endswith(ends):
                checkpoint.replace(name, apply(tensor))

    return edit


def add_tensor(converted: Converted, name: str, tensor: torch.Tensor, *, beside: str) -> None:
    change(converted, lambda c: c.shards[c.shard_of(beside)].__setitem__(name, tensor))
