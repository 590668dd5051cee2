"""Old figures never answer for changed files, and no file or row of an evaluation is lost without a word."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from command import messages_of, run_here
from conversions import convert
from damaged_files import flip
from evaluation_makers import evaluation_of, write_evaluation

from k2convert.evaluation.scores import compare_models
from k2convert.records.evaluation import Evaluation, EvaluationRow, find_evaluation
from scripts.fixture_maker.damage import edit_config, edit_json

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("--tokens", "64", "--window", "32", "--device", "cpu")


@pytest.fixture(scope="module")
def results(cut: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Results by two rules."""
    folder = tmp_path_factory.mktemp("results")
    return convert(cut, folder / "mse"), convert(cut, folder / "max", rule="max")


@pytest.fixture
def pair(cut: Path, results: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A source and a result of it, to be changed."""
    source = Path(shutil.copytree(cut, tmp_path / "source"))
    return source, Path(shutil.copytree(results[0], tmp_path / "ours"))


def evaluate(*words: object, text: Path, code: int = 0) -> CompletedProcess[str]:
    return run_here("evaluate", *words, "--text", text, *SMALL, code=code)


def rows(path: Path) -> list[EvaluationRow]:
    return list(find_evaluation(path).rows)


def modes(path: Path) -> list[str]:
    return [row.model.mode for row in rows(path)]


def theta(folder: Path) -> None:
    edit_config(folder, rope_theta=5000.0)


def weights_in_place(folder: Path) -> None:
    """Change a byte of each shard with its old time, as another tool could."""
    for shard in folder.glob("model-*.safetensors"):
        before = shard.stat()
        flip(shard, -1)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def other_weights(folder: Path) -> None:
    """Put the same shards there again: nobody can know that they are equal."""
    for shard in folder.glob("model-*.safetensors"):
        data = shard.read_bytes()
        shard.unlink()
        shard.write_bytes(data)


def touched_config(folder: Path) -> None:
    """Change one blank of config.json."""
    path = folder / "config.json"
    path.write_bytes(path.read_bytes() + b"\n")


CHANGES: dict[str, Callable[[Path], None]] = {
    "theta": theta,
    "experts of a token": lambda folder: edit_config(folder, num_experts_per_tok=2),
    "weights": weights_in_place,
    "the same weights again": other_weights,
}


def other_words(folder: Path) -> None:
    """Change what no figure depends on, as maintainers do after a release."""
    edit_json(folder / "tokenizer_config.json", lambda document: document.update(note="new"))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "special_tokens_map.json").write_text('{"pad_token": "x"}')
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")


def other_ids(folder: Path) -> None:
    """Let two tokens change their ids, so that a text is another one for the model."""

    def swap(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]

    edit_json(folder / "tokenizer.json", swap)


@pytest.mark.slow
def test_an_evaluation_is_not_taken_for_one_of_the_ids_of_another_tokenizer(
    pair: tuple[Path, Path], text: Path
) -> None:
    evaluate(*pair, text=text)
    for folder in pair:
        other_words(folder)
    assert "already complete" in evaluate(*pair, text=text).stderr
    for folder in pair:
        other_ids(folder)
    refused = evaluate(*pair, text=text, code=1).stderr
    assert "holds another evaluation (calibration.txt, other tokens or windows of it: W4A4). Delete it" in refused
    (pair[1] / "evaluation.json").unlink()
    assert "already complete" not in evaluate(*pair, text=text).stderr


@pytest.mark.slow
def test_rows_survive_what_cannot_change_them(pair: tuple[Path, Path], ids: Path) -> None:
    source, result = pair
    evaluate(source, result, text=ids)
    edit_json(source / "config.json", lambda config: config.update(eos_token_id=7))
    touched_config(source)
    for folder in pair:
        other_words(folder)
    assert "already complete" in evaluate(source, result, text=ids).stderr
    touched_config(result)
    assert "already complete" not in evaluate(source, result, text=ids).stderr, "a row names the result's config.json"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_a_changed_file_is_evaluated_again(pair: tuple[Path, Path], ids: Path, first: int) -> None:
    evaluate(*pair, text=ids)
    for number, (name, change) in enumerate(CHANGES.items(), first):
        change(pair[number % 2])
        assert "already complete" not in evaluate(*pair, text=ids).stderr, name
    assert "already complete" in evaluate(*pair, text=ids).stderr


@pytest.mark.slow
def test_another_theta_has_other_figures(pair: tuple[Path, Path], results: tuple[Path, Path], ids: Path) -> None:
    source, result = pair
    evaluate(source, result, text=ids)
    first = rows(result)[0].figures
    theta(result)
    evaluate(source, result, text=ids)
    second = rows(result)[0].figures
    assert second.divergence.mean > 2 * first.divergence.mean
    shutil.copy(results[0] / "config.json", result)
    (result / "k2convert.json").unlink()
    shutil.rmtree(result / ".k2convert")
    evaluate(source, result, text=ids)
    assert rows(result)[0].figures == first
    for shard in results[1].glob("model-*.safetensors"):
        shutil.copy(shard, result)
    evaluate(source, result, text=ids)
    assert rows(result)[0].figures.divergence.mean > first.divergence.mean


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "side"), [("theta", 0), ("weights", 1), ("weights", 0)])
def test_an_interrupted_evaluation_does_not_go_on_with_changed_files(
    pair: tuple[Path, Path], ids: Path, monkeypatch: pytest.MonkeyPatch, name: str, side: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("k2convert.evaluation.streamed.score_tokens", lambda *_args, **_options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluate(*pair, text=ids)
    CHANGES[name](pair[side])
    done = evaluate(*pair, text=ids, code=1)
    assert "evaluation.work: holds a different evaluation: " in done.stderr
    assert f"{pair[side].name}/{'config.json' if name == 'theta' else 'model-00001'}" in done.stderr
    assert not (pair[1] / "evaluation.json").exists()


def test_a_file_that_changes_is_refused(pair: tuple[Path, Path], ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k2convert.evaluation import streamed

    gather = streamed._gather

    def late(*arguments: Any) -> Evaluation:
        weights_in_place(pair[0])
        return gather(*arguments)

    monkeypatch.setattr(streamed, "_gather", late)
    done = evaluate(*pair, text=ids, code=1)
    assert "changed while the evaluation ran" in done.stderr
    assert not (pair[1] / "evaluation.json").exists()


def test_a_source_with_an_evaluation_gives_a_result_without_one(cut: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(cut, tmp_path / "source"))
    (source / "evaluation.json").write_text('{"of": "the source"}')
    run_here("run", source, tmp_path / "out", code=0)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_shard_that_is_made_again_keeps_the_evaluation(cut: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run_here("run", cut, out, code=0)
    write_evaluation(out, evaluation_of(out))
    before = (out / "evaluation.json").read_bytes()
    next(out.glob("*.safetensors")).unlink()
    assert "resuming" in run_here("run", cut, out, "--verify", code=0).stderr
    assert (out / "evaluation.json").read_bytes() == before
    assert run_here("validate", out, "--source", cut).returncode == 0


@pytest.mark.slow
def test_a_pruned_result_and_a_bf16_copy_are_evaluated(tiny: Path, text: Path, tmp_path: Path) -> None:
    experts = {str(layer): list(range(layer, layer + 10)) for layer in (1, 2, 3)}
    (tmp_path / "kept.json").write_text(json.dumps({"experts": experts}))
    run_here("prune", tiny, tmp_path / "source", "--keep", tmp_path / "kept.json", code=0)
    run_here("run", tmp_path / "source", tmp_path / "pruned", "--quiet", code=0)
    run_here("run", tiny, tmp_path / "bf16", "--set", "target=bf16", "--quiet", code=0)
    evaluate(tiny, tmp_path / "pruned", tmp_path / "bf16", text=text)
    [pruned], [exact] = rows(tmp_path / "pruned"), rows(tmp_path / "bf16")
    assert pruned.figures.divergence.mean > 1e-3
    assert all(layer.routing_agreement is not None and layer.routing_agreement < 1 for layer in pruned.layers[1:])
    assert exact.figures.divergence.mean < 1e-3
    assert exact.model.activations is None


def test_only_an_evaluation_is_replaced(pair: tuple[Path, Path], ids: Path, tmp_path: Path) -> None:
    source, result = pair
    mine = tmp_path / "mine.json"
    mine.write_text('{"the": "only copy"}')
    link = tmp_path / "link.json"
    link.symlink_to(mine)
    shard = next(result.glob("model-*.safetensors"))
    before = {path: path.read_bytes() for path in (result / "config.json", shard, ids, mine, result / "tokenizer.json")}
    for out in (*before, link, tmp_path):
        done = evaluate(source, result, "--out", out, text=ids, code=1)
        assert (done.stdout, messages_of(done.stderr).count("\n")) == ("", 1)
        assert f"{out}: is " in done.stderr
    assert {path: path.read_bytes() for path in before} == before
    (result / "evaluation.json").write_text("my notes")
    assert "evaluation.json: is not an evaluation" in evaluate(source, result, text=ids, code=1).stderr
    assert (result / "evaluation.json").read_text() == "my notes"
    assert not list(tmp_path.glob("*.work"))


@pytest.mark.slow
def test_a_wider_evaluation_replaces_a_narrower_one_and_no_row_is_lost(
    pair: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    source, result = pair
    evaluate(source, result, text=ids)
    [alone] = rows(result)
    evaluate(source, result, "--activations", "both", text=ids)
    assert modes(result) == ["W4A16", "W4A4"]
    assert alone in rows(result)
    before = (result / "evaluation.json").read_bytes()
    other = tmp_path / "other.npy"
    np.save(other, np.load(ids)[::-1])
    for more, text in ((("--kv-cache", "fp8"), ids), ((), other)):
        done = evaluate(source, result, *more, text=text, code=1)
        assert "holds another evaluation (ids.npy: W4A16, W4A4)" in done.stderr
        assert "Delete it, or name a different file with --out" in done.stderr
        assert (result / "evaluation.json").read_bytes() == before
    (result / "evaluation.json").unlink()
    evaluate(source, result, text=other)
    assert modes(result) == ["W4A4"]


@pytest.mark.slow
def test_a_file_of_several_checkpoints_is_not_replaced_by_one(
    cut: Path, results: tuple[Path, Path], ids: Path, tmp_path: Path
) -> None:
    out = tmp_path / "all.json"
    mse, other = results
    evaluate(cut, mse, other, "--out", out, text=ids)
    assert [row.model.name for row in rows(out)] == ["mse", "max"]
    before = out.read_bytes()
    assert "holds another evaluation" in evaluate(cut, mse, "--out", out, text=ids, code=1).stderr
    assert out.read_bytes() == before
    assert "already complete" in evaluate(cut, mse, other, "--out", out, text=ids).stderr


def test_a_moved_result_keeps_its_evaluation(pair: tuple[Path, Path], ids: Path, tmp_path: Path) -> None:
    source, result = pair
    evaluate(source, result, text=ids)
    moved = result.rename(tmp_path / "moved")
    assert "already complete" in evaluate(source, moved, text=ids).stderr


def test_the_verdict_is_of_paired_differences(cut: Path, results: tuple[Path, Path], ids: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    done = evaluate(cut, *results, "--activations", "both", "--out", out, text=ids)
    evaluation = find_evaluation(out)
    assert evaluation.verdicts == compare_models(evaluation.rows)
    assert [(verdict.nearer.activations, verdict.farther.activations) for verdict in evaluation.verdicts] == [
        ("w4a16", "w4a16"),
        ("w4a4", "w4a4"),
    ]
    for again in (done, evaluate(cut, *results, "--activations", "both", "--out", out, text=ids)):
        assert f"{out}\n" in again.stdout
        assert messages_of(again.stderr).splitlines()[-1] == "next: k2convert guide prove", "no report has it"
    for verdict in evaluation.verdicts:
        near, far = (
            next(row for row in evaluation.rows if row.model == model).figures.divergence
            for model in (verdict.nearer, verdict.farther)
        )
        differences = np.array(far.by_window) - np.array(near.by_window)
        assert verdict.difference.mean == pytest.approx(far.mean - near.mean, rel=1e-9)
        assert verdict.difference.standard_error == pytest.approx(differences.std(ddof=1) / np.sqrt(2), rel=1e-9)
        words = "is nearer than" if verdict.is_clear else "no measurable difference between"
        assert f"{verdict.nearer.name} {verdict.nearer.mode}" in done.stdout
        assert words in done.stdout
    assert json.loads(out.read_text())["verdicts"][0]["nearer"]["name"] == evaluation.verdicts[0].nearer.name
