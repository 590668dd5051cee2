"""All of K2: 60 layers x 384 experts x 3 projections, as synthetic records."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k2convert.records.document import seal
from k2convert.records.fingerprint import fingerprint_digest
from k2convert.report import write_report

NUM_WEIGHTS = 2048 * 7168
NUM_BLOCKS = NUM_WEIGHTS // 16


def metrics(random: np.random.Generator, shape: list[int], layer: int) -> dict[str, Any]:
    """A tensor as the conversion would have measured it, with a few that came out badly."""
    sqnr = 22.6 + 0.05 * np.sin(layer / 9) + random.normal(0, 0.02) - 2.0 * (random.random() < 0.0005)
    error = 14680.0 / 10 ** (sqnr / 10)
    return {
        "num_weights": NUM_WEIGHTS, "num_blocks": NUM_BLOCKS, "energy": 14680.0, "squared_error": error,
        "num_nonzero": NUM_WEIGHTS * 7 // 8, "equal_nonzero": NUM_WEIGHTS // 64, "equal_blocks": NUM_BLOCKS // 100,
        "num_codes": NUM_WEIGHTS, "max_error_steps": 1.1, "recoverable_codes": NUM_WEIGHTS * 19 // 20,
        "num_five_or_seven": NUM_WEIGHTS // 9, "num_minus_eight": 0, "blocks_outside_normal": 0,
        "scale_spread_exceeded": 0, "min_scale_byte": 80, "max_scale_byte": 79 + len(shape),
        "scale_histogram": {str(80 + i): count for i, count in enumerate(shape)}, "sampled_blocks": NUM_BLOCKS // 64,
        "sampled_error_achieved": error / 64, "sampled_error_max": error / 32,
    }  # fmt: skip


@pytest.fixture
def k2_records(local_result: Path, tmp_path: Path) -> Path:
    job = json.loads((local_result / ".k2convert/job.json").read_text())
    digest = fingerprint_digest(job["fingerprint"])
    random = np.random.default_rng(0)
    weights = np.exp(-(((np.arange(46) - 32) / 6.0) ** 2))
    shape = (weights / weights.sum() * NUM_BLOCKS).astype(int).tolist()
    folder = tmp_path / "k2"
    (folder / ".k2convert/shards").mkdir(parents=True)
    shards: dict[str, int] = {}
    for layer in range(1, 61):
        name = f"model-{layer:05d}-of-000060.safetensors"
        shards[name] = 9_800_000_000
        projections = [
            {
                "module": f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj",
                "role": "experts",
                "global_scale": 2.0**-12,
                "metrics": metrics(random, shape, layer),
            }
            for expert in range(384)
            for projection in ("gate", "up", "down")
        ]
        record = {
            "shard": name, "fingerprint": digest, "blake3": "0", "file_bytes": shards[name], "num_tensors": 4617,
            "source_headers": {}, "projections": projections,
        }  # fmt: skip
        (folder / f".k2convert/shards/{name}.json").write_bytes(seal(record))
    (folder / ".k2convert/job.json").write_text(json.dumps(job | {"shards": shards}))
    return folder


@pytest.mark.slow
def test_all_of_k2_is_reported_in_less_than_two_megabytes(k2_records: Path, tmp_path: Path) -> None:
    files = write_report(folder=k2_records, out=tmp_path / "out")
    assert files.picture is not None
    assert [found.values.shape for found in files.report.maps] == [(60, 384)] * 3
    assert len(files.report.tensors) == 69_120
    assert files.page.stat().st_size < 2_000_000
    assert files.picture.stat().st_size < 300_000
    assert files.markdown.stat().st_size < 20_000
