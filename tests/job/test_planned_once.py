"""What is decided from headers is decided once per job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k2convert.checkpoint.index import open_checkpoint
from k2convert.job import resources
from k2convert.job.locations import Destination, Source
from k2convert.job.prepare import choose_recipe, prepare
from k2convert.job.run import execute


def test_each_header_of_the_result_is_encoded_once_to_plan_a_job(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = resources.encode_header, list[Any]()

    def counted(tensors: Any, **options: Any) -> bytes:
        encoded.append(tensors)
        return encode(tensors, **options)

    monkeypatch.setattr(resources, "encode_header", counted)
    checkpoint = open_checkpoint(tiny)
    recipe = choose_recipe(checkpoint, None, {})
    job = prepare(source=Source(checkpoint), destination=Destination(tmp_path / "out"), recipe=recipe, device="cpu")
    execute(job)
    assert len(encoded) == len(job.plan.jobs) == 5
    sizes = {item.name: item.output_bytes for item in job.items}
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
