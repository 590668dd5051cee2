"""Text becomes the tokens that the model's own tokenizer gives."""

import base64
import itertools
import json
from pathlib import Path

import pytest
import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from k2convert.errors import CalibrationError, CheckpointError
from k2convert.text import tokenizers as module
from k2convert.text.tokenizers import KIMI_PATTERN, open_tokenizer
from tests.text.kimi_files import SPECIAL, write_kimi_files

PIECES = {
    "中文English混合": ["中文", "English", "混合"],
    "汉字abc": ["汉字", "abc"],
    "北京市 Pascal": ["北京市", " Pascal"],
    "第3章 12345人": ["第", "3", "章", " ", "123", "45", "人"],
    "don't I'LL we'VE it'd": ["don't", " I'LL", " we'VE", " it'd"],
    "HTTPServer camelCase": ["HTTPServer", " camel", "Case"],
    "日本語のテキスト": ["日本語", "のテキスト"],
    "한국어 русский": ["한국어", " русский"],
    "x=1;  // ok\r\n\r\n\ty": ["x", "=", "1", ";", " ", " //", " ok", "\r\n\r\n", "\ty"],
    "a  b \n c   ": ["a", " ", " b", " \n", " c", "   "],
    "½ ² Ⅷ 1 000 000": ["½", " ", "²", " ", "Ⅷ", " ", "1", " ", "000", " ", "000"],
    "e\u0301te\u0301 🙂🙂!": ["e\u0301te\u0301", " 🙂🙂!"],
    "<|im_end|>": ["<|", "im", "_end", "|>"],
}
"""How Kimi's tokenizer cuts a text: Han apart from other letters, digits by three, contractions with their word."""

TEXT = "\n".join(PIECES) + (Path(__file__).parents[1] / "data/k2-tiny/eval.txt").read_text()[:20_000]


def encode(folder: Path, text: str, *, special: bool = False) -> list[int]:
    return open_tokenizer(folder).encode(text, special=special).tolist()


@pytest.mark.parametrize("text", PIECES)
def test_a_text_is_cut_as_kimi_cuts_it(text: str, tmp_path: Path) -> None:
    """Every piece is one token, and every two neighbors would be one token too, were they not cut apart."""
    pieces = PIECES[text]
    assert "".join(pieces) == text
    assert [match[0] for match in regex.finditer(KIMI_PATTERN, text, flags=regex.VERSION1)] == pieces
    pairs = [left + right for left, right in itertools.pairwise(pieces)]
    tokens = list(dict.fromkeys(t.encode() for t in [*pieces, *pairs] if len(t.encode()) > 1))
    names = [bytes([i]) for i in range(256)] + tokens
    assert [names[i].decode() for i in encode(write_kimi_files(tmp_path, tokens), text)] == pieces


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """A tokenizer trained by tokenizers with Kimi's pattern; its regular expressions are Oniguruma's."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(KIMI_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def test_kimis_files_give_the_tokens_of_another_library(trained: tokenizers.Tokenizer, tmp_path: Path) -> None:
    letters = {letter: byte for byte, letter in byte_letters().items()}
    names = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(letters[c] for c in name) for name, _ in names]
    folder = write_kimi_files(tmp_path, [token for token in tokens if len(token) > 1])
    ranks = [bytes([i]) for i in range(256)] + [token for token in tokens if len(token) > 1]
    for text in (TEXT, *PIECES, "", " ", "\n" * 1000, TEXT * 25):
        expected = [tokens[i] for i in trained.encode(text, add_special_tokens=False).ids]
        assert [ranks[i] for i in encode(folder, text)] == expected


def byte_letters() -> dict[int, str]:
    """The letter that byte-level vocabularies have for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [i for i in range(256) if i not in printable]
    return {i: chr(i) for i in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def test_a_special_token_is_max_in_a_text_and_special_in_a_chat(tmp_path: Path, tiny: Path) -> None:
    folder = write_kimi_files(tmp_path, [])
    text = "<|im_user|>user<|im_middle|>Hi<|im_end|>"
    assert encode(folder, text) == list(text.encode())
    base = 256
    expected = [base + SPECIAL["<|im_user|>"], *b"user", base + SPECIAL["<|im_middle|>"], *b"Hi", base + 2]
    assert encode(folder, text, special=True) == expected
    assert encode(folder, "<|reserved_token_511|>", special=True) == [511]
    assert encode(tiny, "a<|endoftext|>b", special=True).count(0) == 1
    assert 0 not in encode(tiny, "a<|endoftext|>b")


def test_tokenizer_json_gives_the_librarys_tokens(tiny: Path, tmp_path: Path) -> None:
    text = (tiny / "eval.txt").read_text()
    expected = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert encode(tiny, text) == expected
    document = json.loads((tiny / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert encode(tmp_path, text) == expected, "what the file says of truncation is for inference"


@pytest.mark.parametrize("shift", [0, 1])
def test_a_renumbered_tokenizer_json_does_not_win_over_tiktoken(shift: int, tmp_path: Path) -> None:
    """A conversion of Kimi's file may renumber special tokens; the engines use tiktoken.model."""
    folder = write_kimi_files(tmp_path, [])
    added = [{"content": name, "id": 256 + i + shift, "special": True} for name, i in SPECIAL.items()]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    letters = {"x": 0, "y": 1}
    vocabulary = letters | {entry["content"]: entry["id"] for entry in added}
    document = {"version": "1.0", "added_tokens": [entry | flags for entry in added]}
    document |= {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "x"}}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert encode(folder, "y", special=True) == ([ord("y")] if shift else [1])
    assert encode(folder, "<|im_end|>", special=True) == [256 + SPECIAL["<|im_end|>"]]


def test_a_long_run_without_spaces_is_encoded(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken panics on a run of a million letters; Kimi's tokenizer cuts it into runs of 25,000."""
    monkeypatch.setattr(module, "MAX_RUN_CHARS", 3)
    folder = write_kimi_files(tmp_path, [b"aa", b"bb"])
    assert [i - 256 if i > 255 else chr(i) for i in encode(folder, "aaaaa  bbbb")] == [0, "a", 0, *"  ", 1, "b", "b"]
    monkeypatch.undo()
    folder = write_kimi_files(tmp_path, [])
    assert len(encode(folder, "x" * 1_000_001)) == 1_000_001
    assert len(encode(folder, " " * 1_000_001)) == 1_000_001
    assert len(encode(tiny, "x" * 100_000)) > 0


RANKS = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("tiktoken.model", b"\x80\x02binary", "not a token in base64"),
        ("tiktoken.model", b"AA== 0\nAA== 1\n", "not a whole tiktoken file"),
        ("tiktoken.model", b"", "not a whole tiktoken file"),
        ("tiktoken.model", RANKS.replace(base64.b64encode(b"\x07"), base64.b64encode(b"ab")), "256 bytes is missing"),
        ("tokenizer.json", b"{}", "the tokenizer failed"),
        ("tokenizer.json", b"\xff\xfe", "the tokenizer failed"),
        ("tokenizer_config.json", b"[]", "not a JSON object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}', "has the entry 'x'"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"3": {"content": "y"}}}', "do not fit tiktoken.model"),
    ],
)
def test_damaged_and_missing_files_are_one_line(name: str, content: bytes, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"has neither tokenizer\.json nor tiktoken\.model"):
        open_tokenizer(tmp_path)
    write_kimi_files(tmp_path, [])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Exception, match=complaint) as failure:
        open_tokenizer(tmp_path)
    assert "\n" not in str(failure.value)
    assert "pass token ids" in str(failure.value), "what to do instead"


def test_ids_become_text(tiny: Path, tmp_path: Path) -> None:
    """A byte that is no text of its own becomes U+FFFD; an id that is no token is one line."""
    kimi = write_kimi_files(tmp_path, [b"ab", b" a"])
    text = "ab aé<|im_end|>\n"
    for folder in (tiny, kimi):
        tokenizer = open_tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
        assert tokenizer.decode([]) == ""
    tokenizer = open_tokenizer(kimi)
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>", special=True).tolist()) == "a<|im_end|>"
    with pytest.raises(CalibrationError, match="the tokenizer failed"):
        tokenizer.decode([5000])
    assert tokenizer.decode([97]) == "a"


def test_a_tokenizer_file_that_is_too_large_or_wrong_is_one_line(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(module.MAX_FILE_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: larger than 67,108,864 bytes.*Download") as failure:
        open_tokenizer(tmp_path)
    assert "\n" not in str(failure.value)
    document = json.loads((tiny / "tokenizer.json").read_text())
    path.write_text(json.dumps(document | {"normalizer": {"type": "Sequence", "normalizers": [7]}}))
    with pytest.raises(CalibrationError, match=r"the tokenizer failed.*Download"):
        open_tokenizer(tmp_path)
