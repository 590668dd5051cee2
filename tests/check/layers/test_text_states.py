"""`validate --layers --text`: a layer is checked on what the model itself computes from a text."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from command import run_here

from k2convert.check import reference_layers
from k2convert.check.reference_layers import check_layers, layers_on_text
from k2convert.check.results import LayersRequest
from k2convert.checkpoint.index import open_checkpoint
from k2convert.cli.progress import Display
from k2convert.forward.weights import WeightReader
from k2convert.plan.recipe import Budget
from k2convert.records.events import SILENT, Extent
from k2convert.text.windows import Windows, read_windows
from tests.forward.observers import transformers_states

pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
pytestmark = pytest.mark.usefixtures("one_thread")


def windows_of(tiny: Path, tokens: int) -> Windows:
    return read_windows([tiny / "eval.txt"], tokenizer=tiny, vocab_size=2048, tokens=tokens, window=64, seed=0)


def test_the_states_are_those_of_transformers(tiny: Path) -> None:
    ids = windows_of(tiny, 128).ids
    expected = [states.flatten(0, 1) for states in transformers_states(tiny, torch.as_tensor(ids)).inputs]
    counts = Display(Extent({"check": (1, 0)}, num_experts=100))
    with closing(WeightReader(open_checkpoint(tiny))) as reader:
        actual = [(layer, x) for layer, _, x, _ in layers_on_text(reader, ids, (3, 1), events=counts)]
    assert [layer for layer, _ in actual] == [1, 3]
    for layer, states in actual:
        assert torch.allclose(states, expected[layer], rtol=1e-4, atol=2e-6 * float(expected[layer].abs().max()))
    assert counts.meters["layers"].done == 2 * 16, "the experts of layers 1 and 2; layer 3's are the check's"


def test_the_check_gets_these_states(tiny: Path, mse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(tiny)
    converted = open_checkpoint(mse)
    windows = windows_of(tiny, 64)
    with closing(WeightReader(source)) as reader:
        [(_, _, states, _)] = layers_on_text(reader, windows.ids, (2,), events=SILENT)
    options: dict[str, Any] = {"source": source, "converted": converted, "budget": Budget()}
    real = check_layers(LayersRequest((2,), windows, 64), **options)
    monkeypatch.setattr(reference_layers, "draw_hidden_states", lambda *_, **__: states)
    assert real.layers == check_layers(LayersRequest((2,), None, 64), **options).layers
    assert real.hidden_states == "text: eval.txt"


def test_the_command_accepts_a_text(tiny: Path, mse: Path) -> None:
    options = ["--layers", "1,2", "--text", str(tiny / "eval.txt"), "--json"]
    shown = run_here("validate", mse, "--source", tiny, *options, code=0)
    assert "layers: 100 % (48 of 48 experts)" in shown.stderr, "those of layer 1 give the hidden states of layer 2"
    layers = json.loads(shown.stdout)["layers"]
    assert layers["hidden_states"] == "text: eval.txt"
    assert [(layer["layer"], layer["tokens"]) for layer in layers["layers"]] == [(1, 2048), (2, 2048)]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--layers", "1", "--text", "nope.txt"], 1, "nope.txt: no such file"),
        (["--text", "nope.txt"], 2, "pass --layers"),
        (
            ["--layers", "1", "--source", "hf://a/b"],
            2,
            "not from hf://: download them with `hf download",
        ),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_at_once(
    options: list[str], code: int, words: str, tiny: Path, mse: Path
) -> None:
    done = run_here("validate", mse, "--source", tiny, *options, code=code)
    assert words in " ".join(done.stderr.replace("│", " ").split())
