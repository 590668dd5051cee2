"""`run --keep-experts`: the result is that of a source which another program pruned, in every kind of job."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import run, run_here
from pruned_makers import make_whole
from results import arrays_of, files_of, raw_tensors, read_json
from statistics_makers import HEADER, random_statistics

from k2convert.calibration.statistics import open_statistics, write_statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.job import run as executor
from k2convert.job.shard import ShardTask
from k2convert.records.document import encode
from k2convert.records.fingerprint import source_digest
from k2convert.records.ledger import ShardRecord, pruned_source, read_ledger
from scripts.fixture_maker.layouts import reap_survivors

INT4 = ("--to", "int4")
SMALL_TEXT = ("--set", "calibration={tokens: 256, window: 64}", "--device", "cpu")
LEDGER = ("k2convert.json",)
KEPT = {1: (1, 2, 3), 2: (0, 1, 3)}


def write_list(path: Path, kept: dict[int, tuple[int, ...]], **others: Any) -> Path:
    path.write_text(json.dumps({"experts": {str(layer): list(experts) for layer, experts in kept.items()}, **others}))
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_list(
        tmp_path_factory.mktemp("kept") / "list.json", reap_survivors(), of=16, chosen_by="a made-up list"
    )


@pytest.fixture(scope="module")
def pruned(tiny: Path, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "int4"
    assert run("run", tiny, folder, "--keep-experts", kept, *INT4, "--quiet") == 0
    return folder


@pytest.fixture(scope="module")
def converted(tiny: Path, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "out"
    assert run("run", tiny, folder, "--keep-experts", kept, "--quiet") == 0
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MoE layers of four experts, of which a token uses two."""
    return make_whole(tmp_path_factory.mktemp("small") / "source")


def headers_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in open_checkpoint(folder).tensors.items()}


FORMS = {
    "nvfp4": (),
    "compressed-tensors": ("--layout", "compressed-tensors"),
    "w4a16": ("--activations", "w4a16"),
    "bf16": ("--to", "bf16"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_it_is_the_pruned_result(options: tuple[str, ...], tiny: Path, reap: Path, kept: Path, tmp_path: Path) -> None:
    assert run("run", tiny, tmp_path / "ours", "--keep-experts", kept, *options, "--quiet") == 0
    assert run("run", reap, tmp_path / "theirs", *options, "--quiet") == 0
    assert raw_tensors(tmp_path / "ours") == raw_tensors(tmp_path / "theirs")
    assert headers_of(tmp_path / "ours") == headers_of(tmp_path / "theirs")
    for name in ("config.json", "model.safetensors.index.json", "hf_quant_config.json"):
        assert files_of(tmp_path / "ours").get(name) == files_of(tmp_path / "theirs").get(name)


def test_int4_stays_as_it_is(tiny: Path, reap: Path, pruned: Path) -> None:
    assert raw_tensors(pruned) == raw_tensors(reap)
    assert headers_of(pruned) == headers_of(reap)
    config = read_json(pruned)
    assert config == read_json(reap)
    assert config == read_json(tiny) | {"n_routed_experts": 10}
    assert "quantization_config" in config
    index, theirs = (read_json(folder, "model.safetensors.index.json") for folder in (pruned, reap))
    assert index["weight_map"] == theirs["weight_map"]
    assert index["metadata"]["total_size"] == sum(map(len, raw_tensors(reap).values()))
    assert (pruned / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    assert not (pruned / "hf_quant_config.json").exists()
    assert read_ledger(pruned).totals == {}


def test_pruning_and_then_converting_gives_the_same_files(pruned: Path, converted: Path, tmp_path: Path) -> None:
    assert run("run", pruned, tmp_path / "later", "--quiet") == 0
    assert files_of(converted, without=LEDGER) == files_of(tmp_path / "later", without=LEDGER)


def test_kept_experts_are_those_of_the_unpruned_result(local_result: Path, converted: Path) -> None:
    survivors = reap_survivors()
    whole = raw_tensors(local_result)
    found = raw_tensors(converted)
    for name, tensor in found.items():
        head, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            number, _, tail = rest.partition(".")
            layer = int(head.rsplit(".", 1)[1])
            assert tensor == whole[f"{head}.mlp.experts.{survivors[layer][int(number)]}.{tail}"], name
        elif ".mlp.gate." in name:
            rows = list(survivors[int(name.split(".")[2])])
            assert tensor == np.frombuffer(whole[name], np.uint8).reshape(16, -1)[rows].tobytes(), name
        else:
            assert tensor == whole[name], name


def test_split_and_wrapped_models_are_equal(
    split: Path, k25: Path, kept: Path, converted: Path, tmp_path: Path
) -> None:
    for name, source in (("split", split), ("k25", k25)):
        assert run("run", source, tmp_path / name, "--keep-experts", kept, "--quiet") == 0
    expected = raw_tensors(converted)
    assert raw_tensors(tmp_path / "split") == expected
    wrapped = {n.removeprefix("language_model."): t for n, t in raw_tensors(tmp_path / "k25").items()}
    assert {name: wrapped[name] for name in expected} == expected
    config = read_json(tmp_path / "k25")
    assert config["text_config"]["n_routed_experts"] == 10
    assert "n_routed_experts" not in config


def test_transformers_loads_the_pruned_model(tiny: Path, kept: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    found: list[torch.Tensor] = []
    ids = torch.randint(0, 2048, (2, 32), generator=torch.Generator().manual_seed(2))
    for name, options in (("whole", ()), ("pruned", ("--keep-experts", kept))):
        assert run("run", tiny, tmp_path / name, "--to", "bf16", *options, "--quiet") == 0
        fields = {key: value for key, value in read_json(tmp_path / name).items() if key != "model_type"}
        config = transformers.DeepseekV3Config(**fields)
        network, info = transformers.DeepseekV3ForCausalLM.from_pretrained(
            tmp_path / name, config=config, dtype=torch.float32, output_loading_info=True
        )
        assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        if name == "whole":  # an expert whose score is minus infinity is never chosen
            for layer, experts in reap_survivors().items():
                dropped = [expert for expert in range(16) if expert not in experts]
                network.model.layers[layer].mlp.gate.e_score_correction_bias[dropped] = -torch.inf
        with torch.inference_mode():
            found.append(network.eval()(ids).logits)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=2e-6 * float(found[0].abs().max()))


def test_statistics_of_the_source_count_for_the_kept_experts(small: Path, tmp_path: Path) -> None:
    """Rule imatrix and smoothing, held against the pruned source with the kept rows of the statistics."""
    of_source = random_statistics(tmp_path / "source.stats", small)
    keep = write_list(tmp_path / "list.json", KEPT)
    words = ("--keep-experts", keep, "--quiet")
    assert run("run", small, tmp_path / "ours", *words, "--statistics", of_source) == 0
    assert run("run", small, tmp_path / "int4", *words, *INT4) == 0
    found = open_statistics(of_source)
    per_expert = ("down_mean_square", "down_amax", "tokens", "saliency", "router_weight")
    layers = [found.layer(0)]
    for number, rows in KEPT.items():
        layer = found.layer(number)
        layers.append(replace(layer, **{name: getattr(layer, name)[list(rows)] for name in per_expert}))
    header = replace(HEADER, source_headers=source_digest(open_checkpoint(tmp_path / "int4")))
    write_statistics(tmp_path / "pruned.stats", layers, header)
    pruned_statistics = ("--statistics", tmp_path / "pruned.stats", "--quiet")
    assert run("run", tmp_path / "int4", tmp_path / "theirs", *pruned_statistics) == 0
    assert files_of(tmp_path / "ours", without=LEDGER) == files_of(tmp_path / "theirs", without=LEDGER)
    ours, theirs = (read_ledger(tmp_path / side).calibration for side in ("ours", "theirs"))
    assert ours is not None
    assert theirs is not None
    assert ours == replace(theirs, statistics=found.digest)
    assert [len(layer.tokens) for layer in ours.layers.values()] == [3, 3]
    assert ours.exponents_digest is not None


@pytest.mark.slow
def test_the_walk_goes_through_the_pruned_model(small: Path, text: Path, tmp_path: Path) -> None:
    keep = ("--keep-experts", write_list(tmp_path / "list.json", KEPT))
    calibrate = ("--calibrate", text, *SMALL_TEXT, "--quiet")
    assert run("run", small, tmp_path / "ours", *keep, *calibrate) == 0
    assert run("run", small, tmp_path / "int4", *keep, *INT4, "--quiet") == 0
    assert run("run", tmp_path / "int4", tmp_path / "theirs", *calibrate) == 0
    assert files_of(tmp_path / "ours", without=LEDGER) == files_of(tmp_path / "theirs", without=LEDGER)


@pytest.mark.slow
def test_saved_statistics_of_a_pruned_walk_are_of_the_kept_experts(small: Path, text: Path, tmp_path: Path) -> None:
    """They are what the pruned source's own walk saves, and serve the same --keep-experts only."""
    keep = ("--keep-experts", write_list(tmp_path / "list.json", KEPT))
    other = ("--keep-experts", write_list(tmp_path / "other.json", {1: (0, 2, 3), 2: (0, 1, 3)}))
    pruned = tmp_path / "int4"
    saved = {name: tmp_path / f"{name}.stats" for name in ("ours", "theirs")}
    assert run("run", small, pruned, *keep, *INT4, "--quiet") == 0
    for name, source, options in (("ours", small, keep), ("theirs", pruned, ())):
        saving = ("--set", f"calibration.save_statistics={saved[name]}", "--quiet")
        walk = ("run", source, tmp_path / name, *options, "--calibrate", text, *SMALL_TEXT, *saving)
        assert run(*walk) == 0
        assert run(*walk) == 0, "the statistics are those of this job"
        use = ("--statistics", saved[name], "--quiet")
        assert run("run", source, tmp_path / f"{name}-imatrix", *options, *use) == 0
    assert arrays_of(saved["ours"]) == arrays_of(saved["theirs"])
    results = [files_of(tmp_path / f"{name}-imatrix", without=LEDGER) for name in saved]
    assert results[0] == results[1]
    use = ("--source", small, "--statistics", saved["ours"])
    run_here("validate", tmp_path / "ours-imatrix", *use, code=0)
    for words in ((), other):
        refused = run_here("run", small, tmp_path / "none", *words, "--statistics", saved["ours"], code=1).stderr
        assert "ours.stats: was made with --keep-experts, and knows only the experts that were kept then." in refused
    scores = ("--keep-experts", saved["ours"], "--set", "experts=2")
    assert "make statistics of all experts" in run_here("run", small, tmp_path / "none", *scores, code=1).stderr
    assert f"--keep-experts FILE --statistics {saved['ours']}" in run_here("inspect", saved["ours"], code=0).stderr


def test_an_interrupted_run_resumes_with_the_same_list_and_refuses_others(
    tiny: Path, kept: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", tiny, tmp_path / "out", "--keep-experts", kept, "--quiet", "--workers", "1")
    convert = executor.convert_shard

    def fails(task: ShardTask, **options: Any) -> ShardRecord:
        if task.shard.name == "model-00003-of-000005.safetensors":
            raise KeyboardInterrupt
        return convert(task, **options)

    with monkeypatch.context() as patched:
        patched.setattr(executor, "convert_shard", fails)
        assert run(*words) != 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    shown = run_here("status", tmp_path / "out", code=0)
    assert "keeps 10 of 16 experts per layer, chosen by a made-up list" in shown.stdout
    assert f"--keep-experts {kept}" in shown.stderr, "the command that resumes"
    document = json.loads(run_here("status", tmp_path / "out", "--json", code=0).stdout)["pruning"]
    assert document["experts"] == {str(layer): list(experts) for layer, experts in reap_survivors().items()}
    changed = write_list(tmp_path / "other.json", reap_survivors() | {2: tuple(range(10))}, chosen_by="a made-up list")
    for others, named in ((("--keep-experts", changed), "kept_experts was '"), ((), "num_kept_experts was '10 of 16'")):
        error = run_here("run", tiny, tmp_path / "out", *others, code=1).stderr
        assert "holds a different job: " in error
        assert named in error
    assert run(*words) == 0
    assert files_of(tmp_path / "out") == files_of(converted)


def test_the_list_travels_with_the_result(tiny: Path, kept: Path, reap: Path, pruned: Path, tmp_path: Path) -> None:
    ledger = read_ledger(pruned)
    assert ledger.pruning is not None
    assert encode(ledger) == (pruned / "k2convert.json").read_bytes()
    assert (ledger.pruning.num_source_experts, ledger.pruning.scores) == (16, "a made-up list")
    assert ledger.recipe.target == "int4"
    assert {"keep_experts", "experts"}.isdisjoint(ledger.recipe), "a path is not part of the result"
    view = pruned_source(open_checkpoint(tiny), ledger)
    assert view.config == open_checkpoint(reap).config
    (tmp_path / "again.json").write_text(json.dumps(read_json(pruned, "k2convert.json")["pruning"]))
    assert run("run", tiny, tmp_path / "again", "--keep-experts", tmp_path / "again.json", *INT4, "--quiet") == 0
    assert files_of(tmp_path / "again") == files_of(pruned)
    assert pruned_source(view, None) is view


def test_a_dry_run_says_what_is_dropped(tiny: Path, kept: Path, reap: Path, tmp_path: Path) -> None:
    words = ("run", tiny, tmp_path / "out", "--keep-experts", kept, "--dry-run")
    document = json.loads(run_here(*words, "--json", code=0).stdout)
    whole = open_checkpoint(tiny)
    left = open_checkpoint(reap)
    dropped = {
        "source_tensors": len(whole.tensors) - len(left.tensors),
        "bytes_in": whole.tensor_bytes - left.tensor_bytes,
    }
    assert document["pruning"]["dropped"] == dropped
    assert dropped["source_tensors"] == 3 * 6 * 9, "layers, experts, tensors"
    assert (document["pruning"]["kept"], document["pruning"]["of"]) == (10, 16)
    assert document["tensor_bytes_in"] == left.tensor_bytes
    assert document["fingerprint"]["num_kept_experts"] == "10 of 16"
    shown = run_here(*words, code=0).stdout
    assert "keeps 10 of 16 experts per layer, chosen by a made-up list: drops 162 tensors, 1.01 MB" in shown
    assert "the result has 6.45 MB" in shown
    assert not (tmp_path / "out").exists()
