"""Conversions the contract is checked on: the kinds that must pass, and what a test needs to break a copy of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3

from k2convert.checkpoint.layouts import LAYOUTS, LayoutNames
from k2convert.validate.contract import check_contract
from k2convert.validate.contract.findings import ContractReport, RuleResult, Verdict
from scripts.fixture_maker import damage
from scripts.fixture_maker.folder import SmallCheckpoint


class Kind(NamedTuple):
    """What a good checkpoint is made of and how; `rule` is plain where the choice of scales is not the point."""

    layout: str
    source: str
    activations: str
    rule: str = "plain"

    def __str__(self) -> str:
        return "-".join(self)


GOOD = [
    Kind("modelopt", "thinking", "w4a4"),
    Kind("modelopt", "thinking", "w4a16"),
    Kind("modelopt", "k2.5", "w4a4"),
    Kind("modelopt", "k2.5", "w4a16"),
    Kind("modelopt", "reap", "w4a4"),
    Kind("modelopt", "thinking", "w4a4", "optimal"),
    Kind("compressed-tensors", "reap", "w4a16"),
    Kind("compressed-tensors", "thinking", "w4a4"),
    Kind("compressed-tensors", "thinking", "w4a16"),
    Kind("compressed-tensors", "k2.5", "w4a16"),
    Kind("compressed-tensors", "k2.5", "w4a4"),
]


@dataclass(frozen=True, slots=True)
class Converted:
    """A finished conversion and what it was made from."""

    kind: Kind
    folder: Path
    source: Path

    @property
    def names(self) -> LayoutNames:
        return LAYOUTS[self.kind.layout]

    @property
    def layers(self) -> str:
        return "language_model.model.layers" if self.kind.source == "k2.5" else "model.layers"

    def expert(self, layer: int, expert: int, projection: str) -> str:
        return f"{self.layers}.{layer}.mlp.experts.{expert}.{projection}_proj"

    def check(self) -> ContractReport:
        return check_contract(checkpoint_folder=self.folder, source_folder=self.source)


def copy_of(converted: Converted, folder: Path) -> Converted:
    """Copy the folder, to break it; the source is shared and stays as it is."""
    shutil.copytree(converted.folder, folder)
    return Converted(converted.kind, folder, converted.source)


def seal(folder: Path) -> None:
    """Write the shards' present hashes into the ledger, so that a change of bytes is not what is found."""
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
    """The one rule that found something, which must be `number`; counts of rule 5 are of no interest elsewhere."""
    found = {n: v for n, v in verdicts(report).items() if n == number or n != 5}
    assert found == {number: verdict}, [(r.number, r.offenders) for r in report.rules if r.number in found]
    return report.rules[number - 1]


def change(converted: Converted, apply: Callable[[SmallCheckpoint], object]) -> None:
    """Change tensors; shards, index and the ledger's hashes are made to fit."""
    damage.edit_checkpoint(converted.folder, apply)
    seal(converted.folder)


def change_tensor(converted: Converted, name: str, apply: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    damage.edit_tensor(converted.folder, name, apply)
    seal(converted.folder)


def set_byte(tensor: torch.Tensor, index: int, value: int) -> torch.Tensor:
    tensor.view(torch.uint8).view(-1)[index] = value
    return tensor


def add_tensor(converted: Converted, name: str, tensor: torch.Tensor, *, beside: str) -> None:
    change(converted, lambda c: c.shards[c.shard_of(beside)].__setitem__(name, tensor))
