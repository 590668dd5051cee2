"""The statistics file: what is written is read back, and nothing else is accepted."""

import json
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from statistics_makers import HEADER, dense_layer, layers_of, moe_layer, write_small

from k2convert.calibration.statistics import (
    StatisticsHeader,
    _read_digests,  # pyright: ignore[reportPrivateUsage]
    open_statistics,
    write_statistics,
)
from k2convert.checkpoint.header import read_header
from k2convert.errors import CalibrationError


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small(tmp_path / "small.safetensors")


def test_a_file_reads_back_as_written(small: Path) -> None:
    found = open_statistics(small)
    assert found.layers == (0, 1, 2)
    assert found.digest == blake3(small.read_bytes()).hexdigest()
    assert StatisticsHeader(**{f.name: getattr(found, f.name) for f in fields(StatisticsHeader)}) == HEADER
    for layer in (dense_layer(), moe_layer(1), moe_layer(2)):
        read = found.layer(layer.layer)
        assert read.norm_digest == layer.norm_digest
        assert read.arrays().keys() == layer.arrays().keys()
        for name, array in layer.arrays().items():
            np.testing.assert_array_equal(read.arrays()[name], array, strict=True)
    assert found.layer(1) is found.layer(1), "a layer is read once"


def test_the_safetensors_library_opens_it(small: Path) -> None:
    tensors = load_file(small)
    np.testing.assert_array_equal(tensors["layers.2.down.mean_square"], moe_layer(2).down_mean_square)
    with safe_open(small, framework="np") as file:
        assert json.loads(file.metadata()["about"])["header"]["texts"][0] == ["emma.txt", "cd" * 32]


def test_the_same_content_is_the_same_bytes_in_any_order(tmp_path: Path, small: Path) -> None:
    write_statistics(tmp_path / "other", [moe_layer(2), dense_layer(), moe_layer(1)], HEADER)
    assert (tmp_path / "other").read_bytes() == small.read_bytes()


def test_pickled_statistics_are_opened_again_and_must_not_have_changed(small: Path) -> None:
    packed = pickle.dumps(open_statistics(small))
    np.testing.assert_array_equal(pickle.loads(packed).layer(1).saliency, moe_layer(1).saliency)
    write_statistics(small, [moe_layer(1)], HEADER)
    with pytest.raises(CalibrationError, match="changed while it was used"):
        pickle.loads(packed)


def test_a_file_that_is_replaced_while_it_is_open_is_noticed(small: Path) -> None:
    found = open_statistics(small)
    write_statistics(small, [dense_layer(), moe_layer(1), moe_layer(2)], replace(HEADER, seed=4))
    with pytest.raises(CalibrationError, match="changed while it was used"):
        found.layer(1)


def message_of(path: Path) -> str:
    with pytest.raises(CalibrationError) as raised:
        layers_of(path)
    text = str(raised.value)
    assert str(path) in text
    assert "\n" not in text
    return text


def test_every_truncation_is_refused(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    for size in [0, 7, 8, 100, len(content) // 2, len(content) - 1]:
        (tmp_path / "cut").write_bytes(content[:size])
        assert "Make it again" in message_of(tmp_path / "cut")
    (tmp_path / "long").write_bytes(content + b"\0")
    assert "longer than its header" in message_of(tmp_path / "long")


def test_what_is_not_a_file_of_statistics_is_refused(tmp_path: Path, tiny: Path) -> None:
    assert "no such file" in message_of(tmp_path / "missing")
    assert "a folder" in message_of(tmp_path)
    assert "not a statistics file" in message_of(next(tiny.glob("*.safetensors")))
    (tmp_path / "text").write_text("It is a truth universally acknowledged")
    assert "not a complete statistics file" in message_of(tmp_path / "text")


def change_metadata(**changes: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, metadata: metadata.update(changes)


def change_about(**changes: Any) -> Callable[[dict[str, Any], dict[str, str]], None]:
    def change(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        about = json.loads(metadata["about"])
        for key, value in changes.items():
            (about if key in about else about["header"])[key] = value
        metadata["about"] = json.dumps(about)

    return change


def change_tensor(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, metadata: tensors.update({name: change(tensors[name])})


def drop(name: str) -> Callable[[dict[str, Any], dict[str, str]], None]:
    return lambda tensors, metadata: tensors.pop(name)


def plant(value: float) -> Callable[[Any], Any]:
    def planted(array: Any) -> Any:
        array.reshape(-1)[3] = value
        return array

    return planted


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (change_metadata(version="1"), "version '1'"),
        (change_about(seed=-1), "header.seed is -1"),
        (change_about(tokens=10**400), "tokens"),
        (change_about(source_headers="?"), "source_headers"),
        (change_metadata(about="[" * 5000), "its metadata"),
        (change_about(norms={}), "layers.0"),
        (change_about(norms={"01": "ab" * 32}), "norms"),
        (change_about(texts=[[3, "x"]]), "texts"),
        (change_about(texts=["emma"]), "texts"),
        (change_about(versions={"torch": 2}), "versions"),
        (drop("layers.1.saliency"), "layer 1 has no saliency"),
        (drop("layers.1.shared_down.amax"), "one of shared_down"),
        (change_tensor("layers.1.saliency", lambda a: a.astype(np.float64)), "layers.1.saliency (F64)"),
        (lambda tensors, _: tensors.update({"layers.9.saliency": np.ones(4, np.float32)}), "layers.9.saliency"),
        (lambda tensors, _: tensors.update({"model.norm.weight": np.ones(4, np.float32)}), "model.norm.weight"),
        (change_tensor("layers.2.gate_up.mean_square", plant(np.nan)), "layer 2: gate_up.mean_square holds NaN"),
        (change_tensor("layers.2.down.mean_square", plant(np.inf)), "layer 2: down.mean_square holds NaN or inf"),
        (change_tensor("layers.2.down.amax", plant(-1.0)), "layer 2: down.amax holds negative"),
        (change_tensor("layers.2.tokens", plant(-1)), "layer 2: tokens holds negative"),
        (change_tensor("layers.2.smoothing_exponents", plant(5)), "outside -4..4"),
        (change_tensor("layers.2.smoothing_exponents", plant(-128)), "outside -4..4"),
        (change_tensor("layers.0.smoothing_exponents", plant(1)), "dense"),
        (
            change_tensor("layers.1.smoothing_exponents", lambda a: a[:32].copy()),
            "smoothing_exponents has 32 values, expected 64",
        ),
        (change_tensor("layers.1.down.mean_square", lambda a: a[:, :30].copy()), "30 columns"),
        (change_tensor("layers.1.down.mean_square", lambda a: a.reshape(-1).copy()), "float32 [128]"),
        (change_tensor("layers.1.tokens", lambda a: a[:3].copy()), "tokens has 3 values, expected 4"),
    ],
)
def test_hostile_files_are_refused_in_one_line(
    change: Callable[[dict[str, Any], dict[str, str]], None], complaint: str, small: Path, tmp_path: Path
) -> None:
    with safe_open(small, framework="np") as file:
        metadata = file.metadata()
    tensors = {name: array.copy() for name, array in load_file(small).items()}
    change(tensors, metadata)
    save_file(tensors, tmp_path / "hostile", metadata)
    _, checksum = _read_digests(tmp_path / "hostile", read_header(tmp_path / "hostile"))
    save_file(tensors, tmp_path / "hostile", metadata | {"blake3": checksum})
    assert complaint in message_of(tmp_path / "hostile")


def test_a_flipped_bit_anywhere_is_refused_in_one_line(small: Path, tmp_path: Path) -> None:
    content = small.read_bytes()
    begin = read_header(small).data_begin
    seed = content.index(b'seed\\": 3') + 8
    for place in (seed, begin, begin + 400, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(CalibrationError, match=r"damaged: its checksum is wrong\. Make it again with"):
            open_statistics(tmp_path / "damaged")
    with safe_open(small, framework="np") as file:
        metadata = {name: value for name, value in file.metadata().items() if name != "blake3"}
    save_file(load_file(small), tmp_path / "without", metadata)
    assert "its checksum is wrong" in message_of(tmp_path / "without")


def test_values_that_cannot_be_are_not_written() -> None:
    with pytest.raises(CalibrationError, match="layer 1: saliency holds NaN"):
        replace(moe_layer(), saliency=np.full(4, np.nan, np.float32))


def test_files_of_the_version_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("k2convert.calibration.statistics.FORMAT_VERSION", "3")
        path = write_small(tmp_path / "old")
    found = open_statistics(path)
    assert found.layer(1).kv_amax is None
    assert found.layer(1).without_imatrix == ()
    assert found.layer(1).arrays().keys() == moe_layer(1).arrays().keys()
