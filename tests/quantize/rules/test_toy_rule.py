"""A new rule needs a word in choices.Rule, a file in quantize/rules/ and a row in the table, and nothing else.

The rule is added to a copy of the package. It has no kernel, so its own arithmetic must convert INT4 and BF16 weights
and give the metrics. Its block scale is amax / 4, the scale under which the largest weight of a block is a four.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import k2convert
from k2convert.plan.recipe import recipes_folder
from k2convert.quantize.kernels import _cpu

TOY = """
from k2convert.quantize.formats.int4 import bf16_values
from k2convert.quantize.formats.nvfp4 import pack_nibbles
from k2convert.quantize.formats.int4 import Int4Weight, dequantize_int4
from k2convert.quantize.formats.nvfp4 import Nvfp4Weight
from k2convert.quantize.rules.max import Magnitude
from k2convert.quantize.rules.max import max_block_scales, max_global_scale, plain_nibbles, max_steps


def toy_global_scale(magnitude: Magnitude, *, is_int4: bool) -> float:
    return 2 * max_global_scale(magnitude)


def quantize_toy(weight, global_scale):
    rows, columns = weight.shape
    bits = dequantize_int4(weight).bits if isinstance(weight, Int4Weight) else weight.bits
    blocks = bf16_values(bits).reshape(-1, 16)
    scales = max_block_scales(abs(blocks).max(axis=1), global_scale * 4 / 6)
    nibbles = plain_nibbles(blocks, max_steps(scales, global_scale)[:, None])
    return Nvfp4Weight(pack_nibbles(nibbles.reshape(rows, columns)), scales.reshape(rows, -1), global_scale)
"""

ROW = '''
    "toy": RuleArithmetic(
        summary="Every block gets its largest weight over 4 as scale.",
        global_scale=toy_global_scale,
        quantize_int4=quantize_toy,
        quantize_bf16=quantize_toy,
    ),
}
"""One row for each word'''

FINDERS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
"""

PROGRAM = '''
import json
import numpy as np
import k2convert
from k2convert.quantize.formats.int4 import Bf16Weight
from k2convert.quantize.formats.int4 import Int4Weight
from k2convert.quantize.quantizer import create_quantizer

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
rng = np.random.default_rng(0)
toy = create_quantizer("native", rule="toy", device="cpu")


def float32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3(scale_bytes):
    exponent, mantissa = (scale_bytes >> 3).astype(float), scale_bytes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))


def check(source, rounded, exact):
    """Convert and compare with nearest scales and codes by exhaustive comparison, and with sums over all weights."""
    magnitude = toy.measure(source, name="w")
    amax = np.abs(rounded).max()
    assert magnitude.amax == amax
    g = toy.global_scale(magnitude, is_int4=isinstance(source, Int4Weight))
    assert g == 2 * np.float32(amax) / np.float32(2688)
    result, metrics = toy.quantize(source, name="w", magnitude=magnitude, global_scale=g)
    blocks = rounded.astype(np.float64).reshape(-1, 16)
    wanted = np.abs(blocks).max(axis=1) / (4 * g)
    grid = e4m3(np.arange(127))
    nearest = np.abs(wanted[:, None] - grid).min(axis=1)
    scales = e4m3(result.block_scales.reshape(-1))
    assert (np.abs(wanted - scales) <= nearest + 1e-6 * wanted).all()
    nibbles = np.stack([result.packed & 15, result.packed >> 4], axis=-1).reshape(-1, 16)
    written = VALUES[nibbles & 7] * np.where(nibbles & 8, -1, 1) * (scales * g)[:, None]
    best = np.abs(np.abs(blocks)[:, :, None] - VALUES * (scales * g)[:, None, None]).min(axis=2)
    assert (np.abs(blocks - written) <= best * (1 + 1e-6) + 1e-12).all()
    error = exact.reshape(-1, 16) - written
    assert np.isclose(metrics.squared_error, (error**2).sum(), rtol=1e-12, atol=0)
    assert np.isclose(metrics.energy, (exact**2).sum(), rtol=1e-12, atol=0)
    assert np.isclose(metrics.sampled_error_achieved, metrics.squared_error, rtol=1e-12, atol=0)
    assert metrics.sampled_blocks == metrics.num_blocks == blocks.shape[0]
    assert metrics.equal_blocks == (error == 0).all(axis=1).sum()
    assert metrics.blocks_outside_normal is None
    assert 0 < metrics.sampled_error_bound <= metrics.sampled_error_max
    return metrics.sqnr_db


codes = rng.integers(-7, 8, (8, 256))
scale_bits = rng.integers(0x3C00, 0x3C80, (8, 8)).astype(np.uint16)
packed = ((codes[:, 0::2] + 8) | (codes[:, 1::2] + 8) << 4).astype(np.uint8)
exact = codes * float32(scale_bits).astype(np.float64).repeat(32, axis=1)
as_float32 = exact.astype(np.float32).view(np.uint32)
rounded = (as_float32 + 0x7FFF + (as_float32 >> 16 & 1) & 0xFFFF0000).astype(np.uint32).view(np.float32)
bits = (rng.standard_normal((8, 256)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
print(json.dumps({
    "package": k2convert.__file__,
    "int4": check(Int4Weight(packed, scale_bits), rounded, exact),
    "bf16": check(Bf16Weight(bits), float32(bits), float32(bits).astype(np.float64)),
}))
'''


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def add_toy_rule(folder: Path) -> Path:
    """Return a copy of the package with the rule, in the folder."""
    copy = folder / "k2convert"
    shutil.copytree(Path(k2convert.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "cpp"))
    shutil.copy(_cpu.__file__, copy / "quantize" / "kernels")
    rules = copy / "quantize" / "rules"
    edit(copy / "choices.py", "\nRule = Literal[", '\nRule = Literal["toy", ')
    (rules / "toy.py").write_text(TOY)
    table = rules / "__init__.py"
    line = "from k2convert.quantize.rules.toy import quantize_toy, toy_global_scale\n"
    edit(table, "\n\nclass GlobalScale", f"{line}\n\nclass GlobalScale")
    edit(table, '\n}\n"""One row for each word', ROW)
    return copy


def run_copy(folder: Path, program: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program that imports the copy in the folder."""
    return subprocess.run(
        [sys.executable, "-c", FINDERS + program, *map(str, words)],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_rule_is_added_by_a_word_a_file_and_a_row(tmp_path: Path) -> None:
    copy = add_toy_rule(tmp_path)
    done = run_copy(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["package"] == str(copy / "__init__.py")
    assert 12 < printed["int4"] < 25
    assert 12 < printed["bf16"] < 25


def test_validate_says_that_a_rule_has_no_kernel(tmp_path: Path, cut: Path) -> None:
    add_toy_rule(tmp_path)
    shutil.copytree(recipes_folder(), tmp_path / "recipes")
    program = "from k2convert.cli.app import main; main(sys.argv[1:])"
    done = run_copy(tmp_path, program, "run", cut, "out", "--rule", "toy", "--quiet")
    assert done.returncode == 0, done.stderr
    done = run_copy(tmp_path, program, "validate", "out", "--source", cut, "--quiet")
    assert re.search(
        r"^rule toy: 12 tensors regenerated from the source, all [0-9,]+ blocks by the rule's arithmetic "
        r"\(it has no kernel\); 0 tensors differ$",
        done.stdout,
        re.MULTILINE,
    ), done.stdout + done.stderr
