"""config.json of a result: the source's, field by field, whatever the conversion did with its own copy."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import run
from conversions import plan_job

from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import CheckpointError, InvalidCheckpointError
from k2convert.job import assemble
from k2convert.job.run import execute
from scripts.fixture_maker.config import published_config

SMALL = ("--set", "calibration={tokens: 256, window: 64}", "--device", "cpu", "--quiet")
KEY = "quantization_config"


def rest_of(folder: Path) -> str:
    def unquantized(node: Any) -> Any:
        return (
            {key: unquantized(value) for key, value in node.items() if key != KEY} if isinstance(node, dict) else node
        )

    return json.dumps(unquantized(json.loads((folder / "config.json").read_text())), indent=1)


def test_the_fixtures_have_every_field_of_the_published_configs(tiny: Path, k25: Path) -> None:
    def fields(node: Any, name: str = "") -> set[str]:
        return {name}.union(*(fields(v, f"{name}.{k}") for k, v in node.items())) if isinstance(node, dict) else {name}

    def of(folder: Path) -> set[str]:
        return fields({k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != KEY})

    thinking = {
        k: v
        for k, v in published_config("moonshotai/Kimi-K2-Instruct").items()
        if k not in (KEY, "torch_dtype", "auto_map")
    }
    assert of(tiny) >= fields(thinking), "the FP8 model calls its dtype torch_dtype, and the fixture has no code"
    assert of(k25) >= fields(published_config("moonshotai/Kimi-K2.5"))
    assert json.loads((k25 / "config.json").read_text())["text_config"]["rope_scaling"]["factor"] == 64


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("tiny", "calibrated"), ("k25", "data-free"), ("k25", "bf16")])
def test_other_fields_stay(name: str, how: str, text: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(name)
    out = tmp_path / "out"
    options: dict[str, tuple[str | Path, ...]] = {
        "data-free": (),
        "calibrated": ("--calibrate", text, *SMALL),
        "bf16": ("--set", "target=bf16"),
    }
    assert run("run", source, out, *options[how]) == 0
    assert rest_of(out) == rest_of(source)
    if how in ("data-free", "calibrated"):
        assert run("validate", out, "--source", source) == 0


def test_transformers_completes_a_copy_of_the_config(k25: Path) -> None:
    attention = pytest.importorskip("k2convert.forward.attention")
    checkpoint = open_checkpoint(k25)
    attention.build_attention(checkpoint.config, where=str(k25))
    assert checkpoint.config == checkpoint.parse_config()


def test_a_change_of_the_jobs_own_copy_does_not_reach_the_result(tiny: Path, tmp_path: Path) -> None:
    job = plan_job(tiny, tmp_path / "out")
    config = job.source.checkpoint.config
    config["rope_scaling"]["rope_type"] = "yarn"
    config["rms_norm_eps"] = 1.0
    execute(job)
    assert rest_of(tmp_path / "out") == rest_of(tiny)


def test_a_result_with_another_config_is_refused(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = assemble.config_document

    def changed(*arguments: Any) -> dict[str, Any]:
        document = before(*arguments)
        document["rope_scaling"]["rope_theta"] = 50000.0
        return document

    monkeypatch.setattr(assemble, "config_document", changed)
    with pytest.raises(InvalidCheckpointError, match=r"config.json: rope_scaling.rope_theta would differ"):
        execute(plan_job(tiny, tmp_path / "out"))
    assert not (tmp_path / "out" / "config.json").exists()
    monkeypatch.undo()
    execute(plan_job(tiny, tmp_path / "out"))
    assert rest_of(tmp_path / "out") == rest_of(tiny)


def test_a_source_config_that_changed_while_the_job_ran_is_refused(tmp_path: Path, tiny: Path) -> None:
    source = Path(shutil.copytree(tiny, tmp_path / "source"))
    job = plan_job(source, tmp_path / "out")
    config = source / "config.json"
    content = config.read_text()
    config.write_text(content.replace('"factor": 64.0', '"factor": 32.0'))
    with pytest.raises(CheckpointError, match=r"config.json: it changed after the job began. Restore it"):
        execute(job)
    assert not (tmp_path / "out" / "config.json").exists()
    config.write_text(content)
    execute(plan_job(source, tmp_path / "out"))
    assert rest_of(tmp_path / "out") == rest_of(tiny)
