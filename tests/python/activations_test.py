"""Holds the NVFP4 quantizer of activation rows to a second implementation in numpy, byte for byte.

Every rounding here is a search for the nearest value of a table (ties to the even code), with no trick that the C++
code might share. Runs tests/quantize_rows from $NIBBLE_BUILD_DIR (default build/release); NIBBLE_SEED changes the rows.
"""

import os
import pathlib
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUANTIZE_ROWS = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build" / "release")) / "tests" / "quantize_rows"
SEED = int(os.environ.get("NIBBLE_SEED", "1"))

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# Magnitudes of e4m3: codes 0..126; 127 is NaN.
E4M3 = np.array([(m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127])


def nearest(values, table):
    """The code of the nearest entry, the even code at a tie; beyond the ends of the table, the ends."""
    error = np.abs(values[..., None].astype(np.float64) - table)
    best = error.min(-1, keepdims=True)
    codes = np.arange(len(table))
    return np.where(error == best, codes + (codes % 2) * len(table), 4 * len(table)).min(-1) % len(table)


def codec(rows, g):
    """Second-level scales, block scales, codes and values without g, of float32 rows."""
    blocks = rows.reshape(len(rows), -1, 16)
    if g is None:
        g = np.abs(rows).max(1) / np.float32(2688)
    g = np.broadcast_to(np.float32(g), len(rows)).astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        scale_codes = nearest(np.where(g > 0, np.abs(blocks).max(2) / np.float32(6) / g, np.float32(0)), E4M3)
    scales = E4M3[scale_codes].astype(np.float32)
    product = (scales * g)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        quotients = np.where(product > 0, blocks / product, np.float32(0))
    codes = nearest(np.abs(quotients), E2M1)
    signed = codes + 8 * np.signbit(quotients)
    values = np.where(np.signbit(quotients), -1, 1) * E2M1[codes] * scales[..., None]
    packed = signed[..., 0::2] | (signed[..., 1::2] << 4)
    flat = len(rows), -1
    return g[:, 0], scale_codes.astype(np.uint8), packed.astype(np.uint8).reshape(flat), values.astype(np.float32).reshape(flat)


def ours(rows, g):
    k = rows.shape[1]
    done = subprocess.run([QUANTIZE_ROWS, str(k), "row" if g is None else repr(float(g))], input=rows.tobytes(),
                          capture_output=True, check=True)
    kind = np.dtype([("g", "<f4"), ("scales", "u1", k // 16), ("codes", "u1", k // 2), ("values", "<f4", k)])
    out = np.frombuffer(done.stdout, kind)
    return out["g"], out["scales"], out["codes"], out["values"]


def expect_equal(rows, g):
    for what, found, wanted in zip(["g", "block scales", "codes", "values"], ours(rows, g), codec(rows, g)):
        where = np.argwhere(found.reshape(wanted.shape) != wanted)
        assert len(where) == 0, f"{what} at {where[0]} and {len(where) - 1} more"


@pytest.mark.parametrize("g", [None, 1.0, 0.0029761905316263437, 0.7])
@pytest.mark.parametrize("k", [16, 128, 2080])
def test_random_rows(k, g):
    random = np.random.default_rng(SEED)
    rows = random.standard_normal((130, k)) * 10.0 ** random.uniform(-4, 3, (130, 1))
    # Outliers, of which real activations are full: blocks whose scale underflows beside them.
    rows[random.random(rows.shape) < 0.01] *= 300
    rows[5, :16] = 0
    expect_equal(rows.astype(np.float32), g)


def test_ties():
    # Quotients at every tie and one step beside it, for scales that are powers of two.
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))])
    rows = np.zeros((3, 64), np.float32)
    rows[:, ::16] = 6
    rows[:, 1:15] = near[:14]
    rows[:, 17:24] = near[14:]
    rows[:, 33:47] = -near[:14]
    expect_equal(rows * np.array([[1], [0.25], [64]], np.float32), 1.0)
    # Block scales at every tie of e4m3.
    scale_ties = ((E4M3[1:] + E4M3[:-1]) / 2).astype(np.float32)
    blocks = np.zeros((len(scale_ties), 16), np.float32)
    blocks[:, 3] = scale_ties * 6
    blocks[:, 7] = -scale_ties
    expect_equal(blocks, 1.0)
