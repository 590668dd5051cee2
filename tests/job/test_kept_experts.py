"""The file of `--keep-experts`: every form is read, and one that cannot be used is refused in a line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import run, run_here
from statistics_makers import layers_of, random_statistics, rewrite

from k2convert.calibration.statistics import open_statistics
from k2convert.checkpoint.index import open_checkpoint
from k2convert.errors import K2ConvertError
from k2convert.hub.client import Hub
from k2convert.job.kept_experts import REAP_REPORT, prune_source
from k2convert.plan.recipe import load_recipe
from k2convert.records.document import plain
from k2convert.records.fingerprint import Source
from k2convert.records.pruning import LeftOut, PruningRecord

RECIPE = "kimi-k2-thinking-nvfp4"
LAYERS = ("1", "2", "3")

# What REAPPruningModifier(sparsity=0.375) of llm-compressor 0.14 wrote for the tiny checkpoint as BF16, on 16 windows
# of 64 tokens of its calibration.txt.
REAP = {
    "model.layers.1.mlp": [0, 1, 2, 3, 4, 6, 7, 12, 13, 15],
    "model.layers.2.mlp": [0, 2, 4, 5, 7, 8, 9, 10, 11, 15],
    "model.layers.3.mlp": [0, 2, 3, 4, 6, 9, 12, 13, 14, 15],
}


def read(path: Path, source: Path, experts: int | None = None, **config: Any) -> PruningRecord:
    checkpoint = open_checkpoint(source)
    checkpoint = replace(checkpoint, config_text=json.dumps(checkpoint.config | config))
    recipe = load_recipe(RECIPE, {"keep_experts": str(path), "experts": experts})
    pruning = prune_source(Source(checkpoint), recipe, hub=Hub()).pruning
    assert pruning is not None
    return pruning


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def in_each_layer(values: Any) -> dict[str, Any]:
    return dict.fromkeys(LAYERS, values)


@pytest.fixture(scope="module")
def statistics(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_statistics(tmp_path_factory.mktemp("statistics") / "tiny.stats", tiny)


def test_a_list_in_any_order(tiny: Path, tmp_path: Path) -> None:
    experts = in_each_layer([15, 2, 0, 7, 4]) | {"3": [1, 3, 5, 6, 8]}
    found = read(written(tmp_path / "list", {"experts": experts}), tiny)
    assert dict(found.kept.layers) == {1: (0, 2, 4, 7, 15), 2: (0, 2, 4, 7, 15), 3: (1, 3, 5, 6, 8)}
    assert (found.num_source_experts, found.scores) == (16, None)
    named = read(written(tmp_path / "list", {"experts": experts, "of": 16, "chosen_by": "hand"}), tiny)
    assert (named.kept, named.scores, named.digest) == (found.kept, "hand", found.digest)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_the_report_of_reap(prefix: str, tiny: Path, tmp_path: Path) -> None:
    report = {prefix + name.removeprefix("model."): experts for name, experts in REAP.items()}
    found = read(written(tmp_path / "report.json", report), tiny)
    assert {f"model.layers.{layer}.mlp": list(experts) for layer, experts in found.kept.layers.items()} == REAP
    assert found.scores == REAP_REPORT


def test_the_highest_scores_are_kept_and_of_equal_ones_the_first(tiny: Path, tmp_path: Path) -> None:
    scores = in_each_layer([0, 1, 2, 3] * 4) | {"2": [0.5] * 16}
    path = written(tmp_path / "scores.json", {"scores": scores, "chosen_by": "a guess", "of": 16})
    found = read(path, tiny, experts=6)
    assert dict(found.kept.layers) == {1: (2, 3, 6, 7, 11, 15), 2: (0, 1, 2, 3, 4, 5), 3: (2, 3, 6, 7, 11, 15)}
    assert found.scores == "a guess"
    assert read(written(path, {"scores": scores}), tiny, experts=6).scores == "unnamed scores"


def test_equally_many_of_each_group_are_chosen(tiny: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "scores.json", {"scores": in_each_layer(list(range(16)))})
    groups = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    assert read(path, tiny, experts=8, **groups).kept.layers[1] == (2, 3, 6, 7, 10, 11, 14, 15)
    with pytest.raises(K2ConvertError, match=r"scores\.json: 10 of 16 experts cannot form 4 equal groups"):
        read(path, tiny, experts=10, **groups)


def test_the_saliency_of_statistics_chooses(tiny: Path, statistics: Path, tmp_path: Path) -> None:
    found = read(statistics, tiny, experts=10)
    for number, kept in found.kept.layers.items():
        layer = open_statistics(statistics).layer(number)
        saliency = layer.saliency
        assert set(kept) == set(np.argsort(-saliency)[:10].tolist())
        dropped = [expert for expert in range(16) if expert not in kept]
        assert found.left_out is not None
        assert found.left_out[number].score == pytest.approx(saliency[dropped].sum() / saliency.sum(), abs=1e-5)
        weight = layer.router_weight
        assert found.left_out[number].router_weight == pytest.approx(weight[dropped].sum() / weight.sum(), abs=1e-5)
    assert found.scores == "REAP saliency on 8,192 tokens of emma.txt, a text"
    again = read(written(tmp_path / "again.json", plain(found)), tiny)
    assert again == found, "the shares travel with the list"


def test_statistics_of_another_model_are_refused(tiny: Path, short: Path, statistics: Path, tmp_path: Path) -> None:
    layers = layers_of(statistics)
    headers = rewrite(statistics, layers, tmp_path / "a", source_headers="ab" * 32)
    changed = [replace(of, norm_digest="ab" * 32) if of.layer == 2 else of for of in layers]
    norm = rewrite(statistics, changed, tmp_path / "b")
    for path, source in ((statistics, short), (headers, tiny)):
        with pytest.raises(K2ConvertError, match="was made from a source with other shard headers"):
            read(path, source, experts=4)
    with pytest.raises(K2ConvertError, match=r"layers\.2\.post_attention_layernorm\.weight differs"):
        read(norm, tiny, experts=10)
    with pytest.raises(K2ConvertError, match="Add --set experts=N"):
        read(statistics, tiny)


EIGHT = list(range(8))
LIST = {"experts": in_each_layer(EIGHT)}
SCORES = {"scores": in_each_layer([1.0] * 16)}


def with_layer(values: Any, layer: str = "2") -> dict[str, Any]:
    return {"experts": in_each_layer(EIGHT) | {layer: values}}


@pytest.mark.parametrize(
    ("document", "count", "says"),
    [
        (with_layer([0, *range(7)]), None, "layer 2: expert 0 is in the list twice"),
        (with_layer([*range(7), 16]), None, "layer 2: expert 16 is not in the model, which has 0..15"),
        (with_layer([-1, *range(7)]), None, "layer 2: expert -1 is not in the model"),
        (with_layer(list(range(9))), None, "layer 2 keeps 9 experts, but layer 1 keeps 8"),
        (with_layer([]), None, "layer 2 keeps 0 experts"),
        ({"experts": in_each_layer([0, 1, 2])}, None, "each token uses 4 (num_experts_per_tok). Keep at least 4."),
        ({"experts": {"1": EIGHT, "2": EIGHT}}, None, "has no layer 3, but the model's MoE layers are 1..3"),
        (with_layer(EIGHT, "7"), None, "has the layer 7"),
        (LIST | {"of": 384}, None, "is for a model with 384 experts per layer, but this model has 16. Use a file"),
        (LIST | {"of": True}, None, "of is True"),
        (with_layer([*range(7), True]), None, "experts.2.7 is True"),
        (with_layer([*range(7), 7.0]), None, "experts.2.7 is 7.0"),
        (with_layer("0-7"), None, "experts.2 is '0-7'"),
        (with_layer(EIGHT, "two"), None, "'two' is not the number of a layer"),
        (with_layer(EIGHT, "02"), None, "'02' is not the number of a layer"),
        ({"experts": {}}, None, "has no layer 1"),
        ({"experts": [EIGHT] * 3}, None, "experts is [["),
        (LIST | {"keep": 8}, None, "keep is unknown"),
        (LIST | {"left_out": {"1": {"score": 0.5, "router_weight": None}}}, None, "Leave out 'left_out'."),
        (LIST | SCORES, None, "experts is unknown"),
        ({}, None, "experts is missing"),
        (LIST | {"chosen_by": "a\nb"}, None, "chosen_by: is not a line"),
        (LIST | {"chosen_by": 5}, None, "chosen_by is 5"),
        (LIST, 8, "lists the experts to keep, so there is nothing to choose. Leave out `experts`"),
        (REAP, 10, "lists the experts to keep, so there is nothing to choose. Leave out `experts`"),
        (REAP | {"a.layers.3.mlp": EIGHT}, None, "has a layer twice"),
        (REAP | {"layers.x.mlp": EIGHT}, None, "experts is missing"),
        (SCORES, None, "has scores, but does not say how many experts to keep. Add --set experts=N"),
        (SCORES, 3, "each token uses 4"),
        (SCORES, 17, "experts 17: the model has 16 experts per layer. Keep fewer"),
        ({"scores": in_each_layer([1.0] * 8)}, 8, "layer 1 has 8 scores, but the model has 16 experts per layer"),
        ({"scores": in_each_layer([True] * 16)}, 8, "scores.1.0 is True"),
        ({"scores": in_each_layer([float("nan")] * 16)}, 8, "scores.1.0 is nan"),
        ({"scores": {"1": [1.0] * 16}}, 8, "has no layer 2"),
        ([EIGHT], None, "not a JSON object"),
    ],
)
def test_unusable_files_are_refused(document: object, count: int | None, says: str, tiny: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "list.json", document)
    with pytest.raises(K2ConvertError) as refused:
        read(path, tiny, experts=count)
    message = str(refused.value)
    assert says in message
    assert message.startswith((f"{path}: ", "experts 17"))
    assert message.count(str(path)) == message.startswith(str(path)), "the file is named once"
    assert re.search(r"\n|\.\.(\s|$)", message) is None
    assert ("Pass {" in message) == ("`k2convert guide prune` shows the forms" in message), "one remedy"


@pytest.mark.parametrize(
    ("scores", "shares"),
    [([0.0, 1.0, 2.0, 1.0] * 4, 0.25), ([-1.0, 1.0, 2.0, 1.0] * 4, None), ([0] * 16, None), ([1e308] * 16, None)],
)
def test_the_share_of_the_scores_is_recorded_if_they_are_parts_of_a_sum(
    scores: list[float], shares: float | None, tiny: Path, tmp_path: Path
) -> None:
    path = written(tmp_path / "scores.json", {"scores": in_each_layer(scores)})
    found = read(path, tiny, experts=8).left_out
    assert found == (None if shares is None else dict.fromkeys((1, 2, 3), LeftOut(shares, None)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "not JSON"),
        (b"1, 2, 3", "not JSON"),
        (b'{"experts": {"1": [0], "1": [1]}}', "duplicate key '1'"),
        (b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe{}", "not UTF-8 text"),
        (b"\x02\0\0\0\0\0\0\0{}", "not a statistics file"),
    ],
)
def test_a_file_of_another_kind_is_refused(content: bytes | None, says: str, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(K2ConvertError, match=says) as refused:
        read(path, tiny)
    assert str(path) in str(refused.value)


def test_options_and_recipe_keys(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "LIST", LIST)
    (tmp_path / "RECIPE").write_text("name: pruned\ntarget: int4\nkeep_experts: LIST\n")
    for number, (options, code, says) in enumerate(
        (
            ("--to int4", 1, "target int4 only drops experts. Add --keep-experts FILE"),
            ("--to int4 --keep-experts LIST --rule max", 1, "Leave out rule"),
            ("--to int4 --keep-experts LIST --calibrate LIST", 1, "Leave out --calibrate"),
            ("--set experts=8", 1, "experts 8 needs a file with scores. Add --keep-experts FILE"),
            ("--keep-experts LIST --set experts=8", 1, "Leave out `experts`"),
            ("--recipe RECIPE --to bf16", 0, "keeps 8 of 16 experts per layer"),
            ("--recipe RECIPE", 0, "keeps 8 of 16 experts per layer"),
        )
    ):
        shown = run_here("run", tiny, tmp_path / str(number), *options.split(), "--quiet", code=code)
        assert says in " ".join((shown.stdout + shown.stderr).replace("\u2502", " ").split())


@pytest.mark.slow
def test_reap_of_llm_compressor_chooses_what_our_saliency_does(tiny: Path, tmp_path: Path) -> None:
    """Its report for a layer whose layers below are not pruned has the experts that our statistics choose."""
    pytest.importorskip("llmcompressor")
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny / "tokenizer.json"))  # runs none of the source's code
    text = (tiny / "calibration.txt").read_text()[:20000]
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"][: 16 * 64]).reshape(16, 64)
    np.save(tmp_path / "ids.npy", ids)
    words = ("--text", tmp_path / "ids.npy", "--tokens", ids.size, "--window", 64, "--quiet")
    assert run("calibrate", tiny, tmp_path / "stats", *words) == 0
    ours = read(tmp_path / "stats", tiny, experts=10)
    assert run("run", tiny, tmp_path / "bf16", "--to", "bf16", "--quiet") == 0
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
    DeepseekV3ForCausalLM.from_pretrained(tmp_path / "bf16", config=DeepseekV3Config(**fields)).save_pretrained(
        tmp_path / "model"
    )
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})

    def report(*ignored: str) -> Path:
        path = tmp_path / f"report-{len(ignored)}.json"
        oneshot(
            model=DeepseekV3ForCausalLM.from_pretrained(tmp_path / "model", dtype="float32").eval(),
            processor=tokenizer,
            dataset=data,
            recipe=REAPPruningModifier(sparsity=0.375, ignore=list(ignored), report_path=str(path)),
            max_seq_length=64,
            num_calibration_samples=16,
            shuffle_calibration_samples=False,
        )
        return path

    first = report()
    written = json.loads(first.read_text())
    assert {name: len(experts) for name, experts in written.items()} == dict.fromkeys(REAP, 10), "the form of REAP"
    assert read(first, tiny).kept.layers[1] == ours.kept.layers[1]
    below = ("layers.1.mlp", "layers.2.mlp")
    for layer in (2, 3):
        found = json.loads(report(*below[: layer - 1]).read_text())
        assert tuple(found[f"model.layers.{layer}.mlp"]) == ours.kept.layers[layer]
