"""Windows of token ids: drawn by a seed, never overlapping, in bounded memory."""

import bz2
import csv
import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from tokenizers import Tokenizer

from k2convert.errors import CalibrationError
from k2convert.text import windows as text
from k2convert.text.windows import Windows, read_windows
from tests.text.kimi_files import write_kimi_files

BYTES = 512
"""The vocabulary of a tokenizer without merges: a token a byte, and 256 special ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder whose tokenizer gives a token a byte, and a chat template."""
    template = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"
    return write_kimi_files(tmp_path_factory.mktemp("tokenizer"), [], chat_template=template)


def read(*files: Path, folder: Path = Path(), tokens: int = 64, window: int = 8, seed: int = 0) -> Windows:
    return read_windows(files, tokenizer=folder, vocab_size=BYTES, tokens=tokens, window=window, seed=seed)


def numbered(path: Path, count: int) -> Path:
    """A text of eight bytes a line, each line different."""
    path.write_text("".join(f"{i:07}\n" for i in range(count)))
    return path


def npy(shape: str) -> bytes:
    """An .npy file with any text as its shape."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(32)


def test_windows_are_pieces_of_the_librarys_tokens(tiny: Path) -> None:
    path = tiny / "calibration.txt"
    windows = read_windows([path], tokenizer=tiny, vocab_size=2048, tokens=16 * 256, window=256, seed=3)
    ids = Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(path.read_text()).ids
    pieces = np.array(ids[: len(ids) // 256 * 256]).reshape(-1, 256)
    positions = [int(np.flatnonzero((pieces == window).all(axis=1))[0]) for window in windows.ids]
    assert windows.ids.shape == (16, 256)
    assert windows.ids.dtype == np.int64
    assert positions == sorted(set(positions)), "no window twice"
    assert windows.texts == (("calibration.txt", blake3(path.read_bytes()).hexdigest()),)
    assert windows.notes == ()


def test_the_seed_decides_which_windows(tmp_path: Path, folder: Path) -> None:
    path = numbered(tmp_path / "a.txt", 1000)
    first, again, other = (read(path, folder=folder, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other.ids)
    starts = [int(bytes(window.astype(np.uint8))) for window in first.ids]
    assert starts == [43, 193, 512, 563, 690, 768, 882, 995], "the same on every machine and version"


def test_several_files_follow_each_other(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffGrüße")
    lines = [
        {"text": "x\n"},
        {"messages": [{"role": "user", "content": "<|im_end|>"}], "text": None, "tools": []},
        {"text": ""},
    ]
    content = "\r\n\n".join(map(json.dumps, lines))
    (tmp_path / "b.JSONL").write_text(content)
    windows = read(tmp_path / "a.txt", tmp_path / "b.JSONL", folder=folder, tokens=100, window=100)
    assert windows.ids.tolist() == [[*"Grüße".encode(), *b"x\n", 256 + 3, 256 + 2, 256 + 2]]
    assert [name for name, _ in windows.texts] == ["a.txt", "b.JSONL"]


@pytest.mark.parametrize(("length", "shape"), [(7, (1, 7)), (8, (1, 8)), (23, (2, 8)), (1, (1, 1))])
def test_a_short_text_gives_what_it_has(length: int, shape: tuple[int, int], tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * length)
    windows = read(tmp_path / "a.txt", folder=folder)
    assert windows.ids.shape == shape
    assert len(windows.notes) == 1
    assert "64 are wanted" in windows.notes[0]


def test_fewer_tokens_than_a_window_are_one_window(tmp_path: Path, folder: Path) -> None:
    windows = read(numbered(tmp_path / "a.txt", 100), folder=folder, tokens=5, window=8)
    assert windows.ids.shape == (1, 5)
    assert windows.notes == ()


def test_ids_made_elsewhere_are_read_in_both_shapes(tmp_path: Path) -> None:
    ids = np.arange(24) % BYTES
    np.save(tmp_path / "flat.npy", ids.astype(np.uint16))
    np.save(tmp_path / "windows.npy", ids.reshape(3, 8))
    for name in ("flat.npy", "windows.npy"):
        windows = read(tmp_path / name)
        assert windows.ids.tolist() == ids.reshape(3, 8).tolist()
        assert windows.texts[0][0] == name


def test_a_large_text_is_read_in_sections_that_lose_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(text, "SECTION_BYTES", 97)
    plain = "".join(f"{i:03}é汉🙂," for i in range(300))
    lines = [f"{i:04}" + "äx" * (i % 80) for i in range(300)]
    (tmp_path / "a.txt").write_text(plain)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    np.save(tmp_path / "a.npy", np.arange(5000) % BYTES)
    for name, expected in (("a.txt", plain.encode()), ("a.jsonl", "".join(lines).encode())):
        windows = read(tmp_path / name, folder=folder, tokens=len(expected), window=len(expected))
        assert bytes(windows.ids[0].astype(np.uint8)) == expected
    assert read(tmp_path / "a.npy", tokens=5000, window=5000).ids.tolist() == [(np.arange(5000) % BYTES).tolist()]
    few = read(tmp_path / "a.txt", folder=folder, tokens=30, window=10)
    assert few.ids.shape == (3, 10)


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "no token in it"),
        ("a.jsonl", b"\n\n", "no token in it"),
        ("a.txt", b"good \xff", r"not UTF-8 text \(byte 5 is 0xff\)"),
        ("a.txt", b"PK\x03\x04\x00\x00", r"not text \(byte 4 is zero\)"),
        ("a.jsonl", b'{"text": "x"}\n\x80', r"not UTF-8 text \(byte 14 is 0x80\)"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]', "line 3: not a JSON object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', r'line 2: not JSON .*\. Write {"messages": '),
        ("a.jsonl", b'{"text": 5}', 'line 1: has neither "text"'),
        ("a.jsonl", b'{"messages": []}', 'line 1: has neither "text"'),
        ("a.jsonl", b'{"messages": ["x"]}', 'line 1: has neither "text"'),
        ("a.jsonl", b'{"messages": [{"a": 1}], "tools": "x"}', 'line 1: has neither "text"'),
        ("a.jsonl", b'{"messages": [{"content": {}}, {"content": "x"}]} {}', "line 1: not JSON"),
        ("a.jsonl", b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "line 1: not JSON"),
        ("a.jsonl", b'{"text": "\\ud83d"}', "line 1: not JSON .half of a surrogate"),
        ("a.jsonl", b'{"text": "' + b"x" * (16 << 20) + b'"}', "line 1: longer than 16,777,216 bytes"),
        ("a.jsonl", b'{"conversations": [{"from": "human", "value": "x"}]}', r'line 1: has "conv.* on each line\.'),
        ("a.jsonl", b'{"prompt": "x", "completion": "y"}', r'line 1: has "prompt" and "completion".* Write {"mess'),
        ("a.jsonl", b'{"instruction": "x", "output": "y"}', "line 1: has neither .* but 'instruction', 'output'"),
        ("a.md", b"PK", r"Give plain text a name in \.txt"),
        ("a.docx", b"PK", r"does not end in \.txt, \.jsonl or \.npy"),
        ("a.csv", b"text\nx\n", r"\.csv is not read\. Convert it: `python3 -c 'import csv"),
        ("a.parquet", b"PAR1", r"\.parquet is not read\. `pip install pandas pyarrow` .*`python3 -c 'import pandas"),
        ("a.jsonl.zst", b"", r"\.zst is not read\. Convert it: `zstd -d "),
        ("a.npy", b"\x93NUMPY\x01\x00", "not an .npy file"),
        ("a.npy", b"\x80\x04K\x01.", "not an .npy file"),
        ("a.npy", npy("(True,)"), "not an .npy file"),
        ("a.npy", npy("(4,"), "not an .npy file"),
        ("a.npy", npy("(" + "9" * 5000 + ",)"), "not an .npy file"),
        ("a.npy", npy("(-4,)"), "not"),
        ("a.npy", npy("(" * 3000), "not an .npy file"),
        ("a.npy", npy("(4,), 'shape': [4]"), "not an .npy file"),
        ("a.jsonl", b"[1, 2]", "line 1: not a JSON object"),
        ("a.jsonl", b'{"input_ids": [1]}', 'line 1: has neither "text"'),
    ],
    ids=range(33),
)
def test_a_file_that_cannot_be_used_is_one_line(
    name: str, content: bytes, complaint: str, tmp_path: Path, folder: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=complaint) as failure:
        read(tmp_path / name, folder=folder)
    assert "\n" not in str(failure.value)
    assert str(tmp_path / name) in str(failure.value)
    assert len(str(failure.value)) < 500


TEXTS = ["one text", "its second, longer"]
ROWS = [{"text": text} for text in TEXTS]


def write_table(path: Path) -> None:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["text"], dialect="excel-tab" if path.suffix == ".tsv" else "excel")
        table.writeheader()
        table.writerows(ROWS)


def write_parquet(path: Path) -> None:
    pytest.importorskip("pandas").DataFrame(ROWS).to_parquet(path, index=False)


WRITERS: dict[str, Callable[[Path], object]] = {
    "a text.json": lambda path: path.write_text(json.dumps(ROWS)),
    "lines.json": lambda path: path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS)),
    "one.json": lambda path: path.write_text(json.dumps({"text": "".join(TEXTS)}, indent=1)),
    "an array.jsonl": lambda path: path.write_text(json.dumps(ROWS)),
    "lines of an array.jsonl": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "it's.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(b"".join(json.dumps(r).encode() + b"\n" for r in ROWS))
    ),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(json.dumps({"text": "".join(TEXTS)}).encode())),
    "a.csv": write_table,
    "a.tsv": write_table,
    "a.parquet": write_parquet,
    "an object with a list.json": lambda path: path.write_text(json.dumps({"version": 1, "data": ROWS})),
    "an object with lines.json": lambda path: path.write_text(json.dumps({"data": ROWS, "n": [2]}, indent=1)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_command_for_a_form_that_is_not_read_makes_one_that_is(name: str, tmp_path: Path, folder: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path)
    with pytest.raises(CalibrationError) as failure:
        read(path, folder=folder)
    command = str(failure.value).partition("Convert it: `")[2].removesuffix("`")
    before = set(tmp_path.iterdir())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(command.replace("python3", sys.executable), shell=True, check=True, env=environment)
    [converted] = set(tmp_path.iterdir()) - before
    ids = read(converted, folder=folder, window=26).ids
    assert bytes(ids[0].astype(np.uint8)).decode() == "".join(TEXTS)


def test_lines_with_null_are_skipped_and_counted_and_images_are_noted(tmp_path: Path, folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    image_messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}]}]
    lines = [
        {"text": "abc"},
        {"text": None},
        {"messages": None, "id": 1},
        {"conversations": messages},
        {"messages": image_messages},
    ]
    lines.append({"messages": messages, "image": "x.png"})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    windows = read(path, folder=folder, tokens=1000, window=1000)
    assert windows.ids[0].tolist()[:3] == list(b"abc")
    assert windows.ids[0][3] >= 256, "the special token that begins a message"
    assert windows.notes[:-1] == (
        "2 lines with null in place of a text: skipped",
        "2 lines with images or other media: their text is read, and only placeholders of the media",
    )
    path.write_text('{"conversations": [{"from": "human", "value": "x"}]}')
    with pytest.raises(CalibrationError, match="the form of ShareGPT"):
        read(path, folder=folder)


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows_is_refused(tmp_path: Path, tiny: Path) -> None:
    path = numbered(tmp_path / "a.txt", 10)
    for folder, num_ids in ((write_kimi_files(tmp_path / "kimi", []), BYTES), (tiny, 2048)):
        with pytest.raises(CalibrationError, match=f"has {num_ids:,} ids, but the embedding has {num_ids - 1:,} rows"):
            read_windows([path], tokenizer=folder, vocab_size=num_ids - 1, tokens=8, window=8, seed=0)


def test_what_is_no_file_is_one_line(tmp_path: Path, folder: Path) -> None:
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(CalibrationError, match="not integers of the shape"):
        read(tmp_path / "floats.npy")
    for wrong, complaint in ((512, r"token id 512, but the model's vocabulary is \[0, 512\)"), (-1, "token id -1")):
        np.save(tmp_path / "ids.npy", np.array([1, wrong]))
        with pytest.raises(CalibrationError, match=complaint):
            read(tmp_path / "ids.npy")
    with pytest.raises(CalibrationError, match="no such file"):
        read(tmp_path / "a.txt", folder=folder)
    with pytest.raises(CalibrationError, match="is a folder or a device"):
        read(tmp_path, folder=folder)


def test_a_huge_text_takes_the_memory_of_a_small_one(tmp_path: Path, folder: Path) -> None:
    """65 MB, of which a few sections of 64 KiB are read for 4,096 tokens."""
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        for _ in range(2000):
            file.write(b'{"text": "some words of a document"}\n' * 900)
    code = (
        "import sys\nfrom pathlib import Path\nfrom k2convert.text.windows import read_windows\n"
        "from k2convert.machine import peak_bytes\nbefore = peak_bytes()\n"
        "w = read_windows([Path(sys.argv[1])], tokenizer=Path(sys.argv[2]), vocab_size=512, tokens=4096, window=256,"
        " seed=0)\n"
        "print(w.ids.size, peak_bytes() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), str(folder)], capture_output=True, text=True)
    count, grown = map(int, done.stdout.split())
    assert count == 4096
    assert grown < 60_000_000
