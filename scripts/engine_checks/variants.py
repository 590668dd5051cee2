"""The checkpoints that engines load: layouts, activation modes, rules and forms of the tiny ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from scripts.engine_checks.k3 import k3_source
from scripts.engine_checks.k25 import wrap_k25

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "k2-tiny"
K2 = "K2"
K25 = "K2.5"
K3 = "K3"
COMPRESSED_TENSORS = "compressed-tensors"
MSE = "mse"
WEIGHT_ONLY = "w4a16"
RULES = (MSE, "max")


@dataclass(frozen=True, slots=True)
class Variant:
    """A kind of converted checkpoint."""

    form: str
    layout: str
    activations: str
    rule: str

    @property
    def name(self) -> str:
        return "-".join((self.form, self.layout, self.activations, self.rule)).lower()

    @property
    def is_compressed_tensors(self) -> bool:
        return self.layout == COMPRESSED_TENSORS

    def in_form(self, form: str) -> Variant:
        """Return the same kind in another form; both have the same language model."""
        return Variant(form, self.layout, self.activations, self.rule)


VARIANTS = tuple(
    Variant(form, layout, activations, rule)
    for form, layout, activations, rule in product(
        (K2, K25, K3), ("modelopt", COMPRESSED_TENSORS), ("w4a4", WEIGHT_ONLY), RULES
    )
    if form != K3 or rule == MSE
)


def convert(variant: Variant, folder: Path) -> Path:
    """Run `k2convert run`; a finished result is kept."""
    source = TINY
    destination = folder / variant.name
    if variant.form == K25:
        source = wrap_k25(TINY, folder / "k2.5-int4")
    elif variant.form == K3:
        source = k3_source(folder / "k3-mxfp4")
    options = ["--layout", variant.layout, "--activations", variant.activations, "--rule", variant.rule]
    command = [sys.executable, "-m", "k2convert", "run", str(source), str(destination), "--json", *options]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return destination
