"""Files beside the weights: a Git LFS pointer is refused; no tokenizer and no code are said before anything is done."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import RunCli

from scripts.fixture_maker.damage import edit_json

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 19587000\n"
CODE = "configuration_deepseek.py"


@pytest.mark.parametrize("name", ["tokenizer.json", "tiktoken.model", "docs/figure.png", "config.json", "LICENSE"])
@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_a_pointer_is_refused(name: str, more: tuple[str, ...], source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text(POINTER)
    shown = run_cli("run", source, tmp_path / "out", *more, code=1)
    assert f"{source / name}: is a Git LFS pointer" in shown.stderr
    assert "git lfs pull" in shown.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_pointer_in_a_result_fails_the_validation(name: str, source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    out = tmp_path / "out"
    run_cli("run", source, out, "--rule", "max", code=0)
    (out / name).write_text(POINTER)
    shown = run_cli("validate", out, code=3)
    assert f"rule 17 fail: {name}: is a Git LFS pointer" in shown.stdout


def without_tokenizer(source: Path) -> str:
    (source / "tokenizer.json").unlink()
    return "tokenizer.json: missing, and tiktoken.model too: engines need the tokenizer"


def without_code(source: Path) -> str:
    names = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModel": "me/other--modeling.Model"}
    edit_json(source / "config.json", lambda config: config.update(auto_map=names))
    return f"{CODE}: missing, but auto_map of config.json names it"


def without_tokenizer_code(source: Path) -> str:
    names = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    edit_json(source / "tokenizer_config.json", lambda config: config.update(auto_map=names))
    return "tokenization_kimi.py: missing, but auto_map of tokenizer_config.json names it"


def empty_tokenizer(source: Path) -> str:
    (source / "tokenizer.json").write_bytes(b"")
    return "tokenizer.json: empty: engines need the tokenizer"


def tokenizer_of_another_model(source: Path) -> str:
    rows = json.loads((source / "config.json").read_text())["vocab_size"]
    edit_json(source / "tokenizer.json", lambda t: t["added_tokens"].append({**t["added_tokens"][0], "id": rows + 6}))
    words = f"has {rows + 7:,} ids, but the embedding has {rows:,} rows: use the tokenizer of these weights"
    return f"tokenizer.json: {words}"


def ranks_of_another_model(source: Path) -> str:
    rows = json.loads((source / "config.json").read_text())["vocab_size"]
    (source / "tokenizer.json").unlink()
    (source / "tiktoken.model").write_text("".join(f"YQ== {rank}\n" for rank in range(rows - 255)))
    return (
        f"tiktoken.model: has {rows + 1:,} ids, but the embedding has {rows:,} rows: use the tokenizer of these weights"
    )


def page_as_tokenizer(source: Path) -> str:
    (source / "tokenizer.json").write_text("<html>404</html>")
    return "tokenizer.json: not a JSON object: engines need the tokenizer"


def cut_tokenizer(source: Path) -> str:
    with (source / "tokenizer.json").open("r+b") as file:
        file.truncate(1000)
    return "tokenizer.json: not a JSON object: engines need the tokenizer"


def without_imported_code(source: Path) -> str:
    without_code(source)
    (source / CODE).write_text("from .kimi_rope import Rope\nfrom transformers import PretrainedConfig\n")
    return f"kimi_rope.py: missing, but {CODE} names it"


def without_code_of_imported_code(source: Path) -> str:
    without_imported_code(source)
    (source / "kimi_rope.py").write_text("if True:\n    from . import tables\n")
    return "tables.py: missing, but kimi_rope.py names it"


def without_vocabulary_of_code(source: Path) -> str:
    without_tokenizer_code(source)
    (source / "tokenization_kimi.py").write_text('VOCAB_FILES_NAMES = {"vocab_file": "tiktoken.model"}\n')
    return "tiktoken.model: missing, but tokenization_kimi.py names it"


def without_vocabulary_of_a_class(source: Path) -> str:
    without_tokenizer_code(source)
    text = 'class TikTokenTokenizer:\n    vocab_files_names: dict[str, str] = {"vocab_file": "kimi.tiktoken"}\n'
    (source / "tokenization_kimi.py").write_text(text)
    return "kimi.tiktoken: missing, but tokenization_kimi.py names it"


def without_table_of_code(source: Path) -> str:
    without_code(source)
    (source / CODE).write_text(
        'import os\nTABLE = open(os.path.join(os.path.dirname(__file__), "tables", "rope.json"))\n'
    )
    return f"tables/rope.json: missing, but {CODE} names it"


def without_words_of_code(source: Path) -> str:
    without_code(source)
    (source / CODE).write_text('from pathlib import Path\nWORDS = (Path(__file__).parent / "words.txt").read_text()\n')
    return f"words.txt: missing, but {CODE} names it"


def without_named_template(source: Path) -> str:
    edit_json(source / "tokenizer_config.json", lambda config: config.update(chat_template_file="chat.jinja"))
    return "chat.jinja: missing, but chat_template_file of tokenizer_config.json names it"


DAMAGES = [
    without_imported_code, without_code_of_imported_code, without_vocabulary_of_code, without_named_template,
    without_vocabulary_of_a_class, without_table_of_code, without_words_of_code,
    without_tokenizer, without_code, without_tokenizer_code, empty_tokenizer, page_as_tokenizer, cut_tokenizer,
    tokenizer_of_another_model, ranks_of_another_model,
]  # fmt: skip


@pytest.mark.quick(2)
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_an_engine_lacks_is_said(
    damage: Callable[[Path], str], source: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    words = damage(source)
    out = tmp_path / "out"
    for more in (("--dry-run",), ()):
        shown = run_cli("run", source, out, "--rule", "max", *more, code=0)
        assert f"warning: {source}: {words}\n" in shown.stderr
    for more in ((), ("--source", source)):
        shown = run_cli("validate", out, *more, code=0)
        assert f"rule 17 warn: {words}\n" in shown.stdout
        assert shown.stderr.count("warning") == 0


def test_code_that_is_there_is_not_missed(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    without_code(source)
    (source / CODE).write_text(
        "from .parts import a\nfrom .parts.b import c\nfrom ..above import d\nraise SystemExit\n"
        "import os.path\nHERE = os.path.join(os.path.dirname(__file__), 'parts', 'b.py')\n"
        "ABOVE = os.path.join(os.path.dirname(__file__), '..', 'x.json')\n"
    )
    (source / "parts").mkdir()
    (source / "parts" / "b.py").write_text("def broken(")
    (source / "parts" / "unused.py").write_text("from .nothing import x\n")
    assert "warning" not in run_cli("run", source, tmp_path / "out", "--dry-run", code=0).stderr


def test_a_link_out_of_the_source_is_neither_copied_nor_silent(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """A clone can have a link to a private file of its reader. Shards may lie on another disk."""
    secret = tmp_path / "home" / ".ssh" / "id_rsa"
    secret.parent.mkdir(parents=True)
    secret.write_text("PRIVATE KEY")
    shard = next(source.glob("*.safetensors"))
    shard.rename(tmp_path / "disk.safetensors")
    shard.symlink_to(tmp_path / "disk.safetensors")
    (source / "LICENSE-2").symlink_to("tokenizer.json")
    (source / "notes.txt").symlink_to(secret)
    (source / "chat_template.jinja").symlink_to(secret)
    (source / "docs").symlink_to(secret.parent)
    out = tmp_path / "out"
    for words in (("run", source, out), ("prune", source, tmp_path / "pruned", "--keep", keep_all(source, tmp_path))):
        shown = run_cli(*words, code=0).stderr
        for name in ("notes.txt", "chat_template.jinja", "docs/id_rsa"):
            assert f"warning: {source}: {name}: left out: a link to {secret}, out of the checkpoint." in shown
        assert "put the file in place of the link" in shown
        assert "LICENSE-2" not in shown
        copied = {path.relative_to(words[2]).as_posix(): path for path in words[2].rglob("*") if path.is_file()}
        assert "LICENSE-2" in copied
        assert not {"notes.txt", "chat_template.jinja", "docs/id_rsa"} & copied.keys()
        assert not any(b"PRIVATE" in path.read_bytes() for path in copied.values())
    missed = run_cli("validate", out, "--source", source, code=3, COLUMNS="300").stdout
    assert "rule 17 fail: chat_template.jinja: missing: the source has a link to" in missed
    assert "rule 17 fail: notes.txt" not in missed
    (source / "chat_template.jinja").unlink()
    (out / "notes.txt").symlink_to(secret)
    assert "rule 17 warn: notes.txt: left out: a link to" in run_cli("validate", out, "--source", source, code=0).stdout


def moved_away(source: Path, name: str, elsewhere: Path) -> Path:
    """Put a link in place of a file."""
    elsewhere.mkdir()
    (source / name).rename(elsewhere / name)
    (source / name).symlink_to(elsewhere / name)
    return elsewhere / name


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("config.json", ("run", "SOURCE", "OUT")),
        ("config.json", ("prune", "SOURCE", "OUT", "--keep", "KEEP")),
        ("config.json", ("inspect", "SOURCE")),
        ("model.safetensors.index.json", ("run", "SOURCE", "OUT", "--dry-run")),
        ("tokenizer.json", ("run", "SOURCE", "OUT", "--calibrate", "TEXT")),
        ("tokenizer_config.json", ("run", "SOURCE", "OUT", "--calibrate", "TEXT", "--dry-run")),
    ],
)
def test_a_link_out_is_refused_where_a_job_needs_the_file(
    name: str, verb: tuple[str, ...], source: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    paths = {"SOURCE": source, "OUT": tmp_path / "out", "KEEP": keep_all(source, tmp_path), "TEXT": tmp_path / "a.txt"}
    paths["TEXT"].write_text("one two three " * 200)
    target = moved_away(source, name, tmp_path / "elsewhere")
    shown = run_cli(*(paths.get(word, word) for word in verb), code=1)
    assert f"{source / name}: is a link to {target}, out of the checkpoint. Only weights may lie" in shown.stderr
    assert "Put the file in place of the link." in shown.stderr
    assert not (tmp_path / "out").exists()
    (source / name).unlink()
    target.rename(source / name)
    run_cli(*(paths.get(word, word) for word in verb if not word.startswith("--cal") and word != "TEXT"), code=0)


def test_links_that_lead_to_no_file_are_named(source: Path, tmp_path: Path, run_cli: RunCli) -> None:
    for name, target in (("notes.txt", "gone"), ("sub/code.py", "../gone.py"), ("itself", "itself")):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).symlink_to(target)
    shown = run_cli("run", source, tmp_path / "out", code=0).stderr
    for name, target in (("notes.txt", "gone"), ("sub/code.py", "../gone.py"), ("itself", "itself")):
        assert f"warning: {source}: {name}: left out: a link to '{target}', which leads to no file." in shown
    run_cli("validate", tmp_path / "out", "--source", source, code=0)


def keep_all(source: Path, folder: Path) -> Path:
    """A list that keeps every expert of each MoE layer."""
    config = json.loads((source / "config.json").read_text())
    experts = list(range(config["n_routed_experts"]))
    layers = range(config["first_k_dense_replace"], config["num_hidden_layers"])
    path = folder / "keep.json"
    path.write_text(json.dumps({"experts": {str(layer): experts for layer in layers}}))
    return path
