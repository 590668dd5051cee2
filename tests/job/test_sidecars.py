"""Files beside the weights: a Git LFS pointer is refused; no tokenizer and no code are said before anything is done."""

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


def without_named_template(source: Path) -> str:
    edit_json(source / "tokenizer_config.json", lambda config: config.update(chat_template_file="chat.jinja"))
    return "chat.jinja: missing, but chat_template_file of tokenizer_config.json names it"


DAMAGES = [
    without_imported_code, without_code_of_imported_code, without_vocabulary_of_code, without_named_template,
    without_tokenizer, without_code, without_tokenizer_code, empty_tokenizer, page_as_tokenizer, cut_tokenizer,
]  # fmt: skip


@pytest.mark.quick(5)
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
    )
    (source / "parts").mkdir()
    (source / "parts" / "b.py").write_text("def broken(")
    (source / "parts" / "unused.py").write_text("from .nothing import x\n")
    assert "warning" not in run_cli("run", source, tmp_path / "out", "--dry-run", code=0).stderr
