"""`compare` against servers on the loopback interface: figures, noise, both engines, and answers that are kept."""

import json
from pathlib import Path

import numpy as np
import pytest
from asking import WINDOW, Compare, Serve
from command import run_here

from k2convert.records.document import parse
from k2convert.records.evaluation import Evaluation, is_noise
from scripts.engine_checks.model_server import VOCABULARY, markov, noisy


def test_the_figures_are_those_of_the_models(serve: Serve, compare: Compare, text: Path) -> None:
    first = serve(markov(1), name="a")
    second = serve(markov(1, apart=0.4), name="b")
    found = compare(first.url, second.url)
    windows = np.load(text).reshape(-1, WINDOW)
    p, q = (np.stack([model.model(list(ids))[:-1] for ids in windows]) for model in (first, second))
    truth = (np.exp(p) * (p - q)).sum(axis=-1)
    figures, (row,) = found["rows"][0]["figures"], found["rows"]
    assert 0.5 * truth.mean() < figures["divergence"]["mean"] < truth.mean()
    own = [float(-np.take_along_axis(x, windows[:, 1:, None], axis=-1).mean()) for x in (p, q)]
    assert figures["reference_perplexity"] == pytest.approx(np.exp(own[0]), rel=1e-6)
    assert figures["perplexity"] == pytest.approx(np.exp(own[1]), rel=1e-6)
    assert figures["log_likelihood"]["mean"] == pytest.approx(own[0] - own[1], rel=1e-5)
    assert figures["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert (found["reference"]["name"], row["model"]["name"]) == tuple(
        f"{s.name} at {s.url.removesuffix('/v1')}" for s in (first, second)
    )
    assert (found["kind"], found["top_k"], found.get("noise", 0.0)) == ("compare", 32, 0.0)
    worst = row["worst"][0]
    assert worst["token"] == f" w{windows[worst['window'], worst['position']]}"
    assert worst["before"].endswith(f" w{windows[worst['window'], worst['position'] - 1]}")
    assert worst["divergence"] == figures["divergence"]["maximum"]


def test_the_document_is_an_evaluation_and_says_a_difference(serve: Serve, options: list[object]) -> None:
    first = serve(markov(1))
    second = serve(markov(1, apart=0.4))
    done = run_here("compare", first.url, second.url, *options, "--json", code=0)
    document = parse(Evaluation, done.stdout, where="stdout")
    assert not is_noise(document, document.rows[0])
    shown = run_here("compare", first.url, second.url, *options, code=0)
    assert "lower bound" in shown.stdout
    assert "different" in shown.stdout
    assert "guide prove" in shown.stderr


def test_a_server_against_itself_is_no_difference(serve: Serve, compare: Compare, options: list[object]) -> None:
    server = serve(markov(1))
    figures = compare(server.url, server.url)["rows"][0]["figures"]
    assert figures["divergence"]["maximum"] == 0
    assert (figures["top1_agreement"], figures["log_likelihood"]["mean"]) == (1, 0)
    assert "no difference" in run_here("compare", server.url, server.url, *options, code=0).stdout


def test_below_the_noise_there_is_no_difference(serve: Serve, options: list[object]) -> None:
    """A server whose answers differ from themselves: a second one like it is none, one that differs more is one."""
    first, like, other = (serve(noisy(markov(1, apart=apart), 0.05)) for apart in (0, 0, 0.3))
    same = run_here("compare", first.url, like.url, *options, code=0).stdout
    different = run_here("compare", first.url, other.url, *options, code=0).stdout
    assert "no difference" in same
    assert "no difference" not in different


def test_sglang_gives_the_same_figures(serve: Serve, compare: Compare) -> None:
    models = (markov(1), markov(1, apart=0.4))
    found = [compare(*(serve(model, engine=engine).url for model in models)) for engine in ("vllm", "sglang")]
    assert found[0]["rows"][0]["figures"] == found[1]["rows"][0]["figures"]
    mixed = compare(serve(models[0], engine="sglang").url, serve(models[1]).url)
    assert mixed["rows"][0]["figures"] == found[0]["rows"][0]["figures"]


def test_kept_answers_are_compared_with_a_later_server(serve: Serve, compare: Compare, options: list[object]) -> None:
    models = (markov(1), markov(1, apart=0.4))
    at_once = compare(*(serve(model, name="m").url for model in models))
    with serve(models[0], name="m") as first:
        run_here("compare", first.url, "--save", "kept", *options, code=0)
        assert len(first.questions) == 12, "six windows, each twice"
    second = serve(models[1], name="m")
    done = run_here("compare", "kept", second.url, "--json", "--quiet", code=0)
    assert json.loads(done.stdout)["rows"][0]["figures"] == at_once["rows"][0]["figures"]
    assert len(second.questions) == 6
    refused = run_here("compare", "kept", second.url, *options, code=2)
    assert "--text" in refused.stderr


def test_one_of_several_models_is_chosen(serve: Serve, options: list[object], compare: Compare) -> None:
    server = serve(markov(1), models=("base", "tuned"))
    assert "--model-a" in run_here("compare", server.url, server.url, *options, code=1).stderr
    found = compare(server.url, server.url, "--model-a", "base", "--model-b", "tuned")
    assert found["reference"]["name"].startswith("base at ")
    assert found["rows"][0]["model"]["name"].startswith("tuned at ")


def test_a_text_needs_a_tokenizer_and_gives_its_windows(serve: Serve, tiny: Path, tmp_path: Path) -> None:
    words = tmp_path / "text.txt"
    words.write_text("".join(f"Sentence {number} of a text. " for number in range(200)))
    server = serve(markov(1, vocabulary=2048))
    arguments = ["compare", server.url, server.url, "--text", words, "--window", 64, "--tokens", 128, "--quiet"]
    assert "--tokenizer" in run_here(*arguments, code=1).stderr
    found = json.loads(run_here(*arguments, "--tokenizer", tiny, "--json", code=0).stdout)
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(words.read_text(), add_special_tokens=False).ids
    pieces = [ids[start : start + 64] for start in range(0, len(ids), 64)]
    assert all(question in pieces for question in server.questions)
    assert found["text"]["texts"][0][0] == "text.txt"


def test_progress_counts_tokens(serve: Serve, options: list[object]) -> None:
    server = serve(markov(1))
    shown = run_here("compare", server.url, server.url, *(word for word in options if word != "--quiet"), code=0).stderr
    assert "compare: 100 % (720 of 720 tokens)" in shown


def test_nothing_is_left_behind(serve: Serve, compare: Compare, tmp_path: Path) -> None:
    compare(serve(markov(1)).url, serve(markov(2)).url)
    assert [path.name for path in tmp_path.iterdir()] == ["ids.npy"]
    assert VOCABULARY > 64, "top 32 is not everything"
