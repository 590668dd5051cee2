"""E2M1 and E4M3 against their definitions and against the libraries' own encoders."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from exact_search import E2M1, e4m3_value, nearest
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from k2convert.quantize.formats.e2m1 import (
    DOUBLED_VALUES,
    QUADRUPLED_MIDPOINTS,
    decode_e2m1,
    nearest_code,
    pack_nibbles,
    unpack_nibbles,
)
from k2convert.quantize.formats.e4m3 import decode_e4m3, encode_e4m3

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_the_value_tables_say_what_the_format_says() -> None:
    assert [Fraction(value, 2) for value in DOUBLED_VALUES] == list(E2M1)
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    assert [Fraction(value, 4) for value in QUADRUPLED_MIDPOINTS] == midpoints


def test_ties_go_to_the_even_code_and_large_values_saturate() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1e30])
    assert nearest_code(values, torch.ones(())).tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 7]


def test_rounding_equals_modelopt_on_a_dense_grid() -> None:
    values = torch.linspace(-7, 7, 28_001)
    theirs = NVFP4QTensor._cast_fp4(values.clone())
    ours = nearest_code(values.abs(), torch.ones(())) | ((values < 0).to(torch.uint8) << 3)
    assert torch.equal(ours, theirs)


def test_rounding_a_ratio_of_integers_is_exact() -> None:
    for step in (8, 9, 11, 15):
        numerators = torch.arange(0, 8 * step)
        expected = [nearest(n, [v * step for v in E2M1]) for n in numerators.tolist()]
        assert nearest_code(numerators, torch.tensor(step)).tolist() == expected


def test_every_byte_decodes_as_both_libraries_decode_it() -> None:
    decoded = decode_e2m1(unpack_nibbles(ALL_BYTES.view(16, 16)))
    theirs = unpack_fp4_from_uint8(ALL_BYTES.view(16, 16), 16, 32, torch.float64)
    assert torch.equal(decoded, theirs)
    assert torch.equal(torch.signbit(decoded), torch.signbit(theirs))
    assert decoded.flatten()[:2].tolist() == [0.0, 0.0]
    modelopt = NVFP4QTensor.get_e2m1_values(torch.device("cpu"))[unpack_nibbles(ALL_BYTES).long()]
    assert torch.equal(decoded.flatten(), modelopt.to(torch.float64))


def test_packing_inverts_unpacking_and_equals_compressed_tensors() -> None:
    nibbles = unpack_nibbles(ALL_BYTES.view(16, 16))
    assert torch.equal(pack_nibbles(nibbles), ALL_BYTES.view(16, 16))
    assert torch.equal(pack_fp4_to_uint8(decode_e2m1(nibbles).to(torch.bfloat16)), ALL_BYTES.view(16, 16))


def test_every_positive_scale_byte_decodes_to_its_definition() -> None:
    decoded = decode_e4m3(ALL_BYTES[:0x7F])
    assert [Fraction(value) for value in decoded.tolist()] == [e4m3_value(byte) for byte in range(0x7F)]
    assert torch.isnan(decode_e4m3(ALL_BYTES[0x7F:0x80])).all()


def test_scales_round_to_the_nearest_byte_ties_to_even() -> None:
    grid = [float(e4m3_value(byte)) for byte in range(0x7F)]
    middles = [(low + high) / 2 for low, high in pairwise(grid)]
    assert encode_e4m3(torch.tensor(grid)).tolist() == list(range(0x7F))
    assert encode_e4m3(torch.tensor(middles)).tolist() == [byte + byte % 2 for byte in range(0x7E)]
