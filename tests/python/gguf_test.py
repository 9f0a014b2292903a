"""Holds nibble's GGUF blocks to the `gguf` package: the same type table, the same float32 bits.

Runs tests/dequantize_blocks from $NIBBLE_BUILD_DIR (default build/release). The blocks are random bytes with a
fixed seed (NIBBLE_SEED changes it), so that scales take NaN, infinity and every sign, too.
"""

import os
import pathlib
import subprocess

import gguf
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build" / "release"))
DEQUANTIZE_BLOCKS = BUILD / "tests" / "dequantize_blocks"
SEED = int(os.environ.get("NIBBLE_SEED", "1"))

READABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def ours(name, blocks):
    done = subprocess.run([DEQUANTIZE_BLOCKS, name], input=blocks.tobytes(), capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype=np.float32)


def theirs(name, blocks):
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return np.asarray(gguf.dequantize(blocks, kind), dtype=np.float32).reshape(-1)


def random_blocks(name, count):
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    return np.random.default_rng(SEED).integers(0, 256, (count, block_bytes), dtype=np.uint8)


def with_every_byte(name, count=4096):
    """Random blocks in which every byte of the block takes every value in turn."""
    blocks = random_blocks(name, max(count, 256 * 8))
    columns = blocks.shape[1]
    for column in range(columns):
        rows = (np.arange(256) * 7 + column * 13) % len(blocks)
        blocks[rows, column] = np.arange(256)
    return blocks


def expect_same_bits(found, wanted):
    assert found.shape == wanted.shape
    # A NaN is a NaN; +0 takes the sign off a zero (quant/gguf_blocks.h says where it differs).
    with np.errstate(invalid="ignore"):
        bits = (found + np.float32(0)).view(np.uint32), (wanted + np.float32(0)).view(np.uint32)
    same = (np.isnan(found) & np.isnan(wanted)) | (bits[0] == bits[1])
    where = np.flatnonzero(~same)
    assert len(where) == 0, f"value {where[0]}: {found[where[0]]!r}, wanted {wanted[where[0]]!r}; {len(where)} differ"


def test_every_type_is_in_the_table_and_no_other():
    lines = subprocess.run([DEQUANTIZE_BLOCKS, "--types"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in lines.splitlines()]
    found = {(int(id), name, int(values), int(size)) for id, name, values, size, _ in rows}
    wanted = {(kind.value, kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert found == wanted
    assert sorted(name for _, name, _, _, readable in rows if readable == "1") == sorted(READABLE)


@pytest.mark.parametrize("name", READABLE)
def test_blocks_of_random_bytes(name):
    blocks = with_every_byte(name)
    if name == "MXFP4":
        blocks = blocks[blocks[:, 0] != 0xFF]
    expect_same_bits(ours(name, blocks), theirs(name, blocks))


@pytest.mark.parametrize("name", [name for name in READABLE if gguf.GGMLQuantizationType[name] > 1 and name != "BF16"])
def test_blocks_with_finite_scales(name):
    """Random f16 scales are small numbers now, so that no NaN hides a wrong code."""
    blocks = with_every_byte(name)
    places = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}.get(name, [])
    generator = np.random.default_rng(SEED + 1)
    for place in places:
        scales = generator.uniform(-2, 2, len(blocks)).astype(np.float16)
        blocks[:, place:place + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = generator.integers(100, 150, len(blocks))
    found = ours(name, blocks)
    assert np.isfinite(found).all()
    expect_same_bits(found, theirs(name, blocks))


@pytest.mark.parametrize("bits", [np.arange(65536, dtype=np.uint16)])
@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_number(name, bits):
    blocks = bits.view(np.uint8).reshape(-1, 2)
    expect_same_bits(ours(name, blocks), theirs(name, blocks))


def test_mxfp4_by_its_definition():
    scales = np.arange(256, dtype=np.uint8).repeat(16)
    codes = np.arange(16, dtype=np.uint8)
    # Byte j: value j low, value j + 16 high. Each block has every code in both halves.
    packed = np.stack([np.roll(codes, shift) | np.roll(codes, -shift) << 4 for shift in range(16)])
    blocks = np.concatenate([scales[:, None], np.tile(packed, (256, 1))], axis=1)
    with np.errstate(all="ignore"):
        factors = np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(int) - 127))
        values = np.concatenate([E2M1[blocks[:, 1:] & 15], E2M1[blocks[:, 1:] >> 4]], axis=1)
        wanted = (factors[:, None] * values).astype(np.float32)
    expect_same_bits(ours("MXFP4", blocks), wanted.reshape(-1))


def test_nvfp4_by_its_definition():
    blocks = with_every_byte("NVFP4")
    blocks[:, :4][blocks[:, :4] == 0xFF] = 0x7F
    scale = blocks[:, :4] & 0x7F
    exponent, mantissa = (scale >> 3).astype(int), (scale & 7).astype(float)
    value = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    value = np.where(blocks[:, :4] == 0x7F, 0.0, value)
    codes = blocks[:, 4:].reshape(-1, 4, 8)
    values = np.concatenate([E2M1[codes & 15], E2M1[codes >> 4]], axis=2)
    expect_same_bits(ours("NVFP4", blocks), (value[:, :, None] * values).astype(np.float32).reshape(-1))
