"""Headers mutated at random: what the safetensors library refuses is refused here too, and nothing else is raised."""

import json
import random
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from k2convert.checkpoint.header import read_header
from k2convert.errors import CheckpointError
from scripts.fixture_maker.damage import write_raw

ENTRIES = {
    "__metadata__": {"format": "pt"},
    "a.weight_packed": {"dtype": "I32", "shape": [4, 4], "data_offsets": [0, 64]},
    "a.weight_scale": {"dtype": "BF16", "shape": [4, 2], "data_offsets": [64, 80]},
    "a.weight_shape": {"dtype": "I64", "shape": [2], "data_offsets": [80, 96]},
    "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [96, 96]},
}
HEADER = json.dumps(ENTRIES).encode()
DATA = bytes(96)


def mutated(draw: random.Random) -> bytes:
    """Change, drop, double or insert one or two bytes; digits and quotes are hit more often."""
    text = bytearray(HEADER)
    for _ in range(draw.randint(1, 2)):
        targets = [i for i, byte in enumerate(text) if chr(byte) in '0123456789"[]{},:']
        place = draw.choice(targets) if draw.random() < 0.5 else draw.randrange(len(text))
        # No minus sign: "-0" is 0 to Python and an error to the library, and harmless.
        new = draw.choice(b'0123456789.eE"[]{},: nulltrue\\\x00\xff')
        match draw.randrange(4):
            case 0:
                text[place] = new
            case 1:
                del text[place]
            case 2:
                text.insert(place, text[place])
            case _:
                text.insert(place, new)
    return bytes(text)


def library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (the library's object is no mapping)
                shard.get_tensor(name)
    except (SafetensorError, UnicodeDecodeError, RuntimeError, ValueError, OverflowError):
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_mutated_headers_are_read_as_the_library_reads_them_or_refused(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    path = tmp_path / "shard.safetensors"
    accepted = refused = 0
    for _ in range(400):
        text = mutated(draw)
        write_raw(path, text, DATA)
        try:
            header = read_header(path)
        except CheckpointError as error:
            refused += str(path) in str(error)
            continue
        accepted += 1
        assert library_reads(path), text
        with safe_open(path, "pt") as shard:
            shapes = {name: tuple(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
        assert {name: tensor.shape for name, tensor in header.tensors.items()} == shapes, text
    assert min(accepted, refused) > 20, "the mutations should do both, and every message name the file"
