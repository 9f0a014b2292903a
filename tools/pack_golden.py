#!/usr/bin/env python3
"""Makes an archive of tests/golden from original ones: `pack_golden.py OUT.tar.xz ORIGINAL.tar.xz...` (numpy alone).

Checkpoints stay byte for byte. Of the references, float32 numbers that hardly compress, only as much stays as a test
needs to see an error: hidden states at every seventh token of the prompt, the last among them, for all layers and streams,
and of golden-w4a4 no hidden states and the logits of every seventh token. A tensor NAME of which rows were chosen has the
tokens' places beside it as NAME.rows.
"""

import argparse
import io
import json
import lzma
import pathlib
import struct
import tarfile

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}
EVERY = 7  # shares no factor with pools, pages and windows
# Floats and codes stand at multiples of four bytes; cases of one archive hold equal bytes tens of MiB apart.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 64 << 20,
            "lc": 2, "lp": 2, "pb": 0}]
MTIME = 1795910400  # a fixed time: the same originals give the same archive


def read_safetensors(data):
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        begin, end = (8 + size + offset for offset in info["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], DTYPES[info["dtype"]]).reshape(info["shape"])
    return tensors


def write_safetensors(tensors):
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, at = {}, 0
    for name, values in sorted(tensors.items()):
        header[name] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for _, values in sorted(tensors.items()))


def choose_rows(tensors, name, axis):
    """Keeps every seventh row of the axis of the tokens, counted from the last."""
    tokens = tensors[name].shape[axis]
    rows = np.arange((tokens - 1) % EVERY, tokens, EVERY, dtype="<i4")
    tensors[name] = np.ascontiguousarray(tensors[name].take(rows, axis))
    tensors[name + ".rows"] = rows


def shrink(name, data):
    """The file as the archive holds it."""
    if name == "golden.safetensors":
        tensors = read_safetensors(data)
        choose_rows(tensors, "hidden.0", axis=1)
    elif name == "golden-w4a4.safetensors":
        tensors = read_safetensors(data)
        del tensors["hidden.0"]
        for logits in sorted(name for name in tensors if name.startswith("logits.")):
            choose_rows(tensors, logits, axis=0)
    else:
        return data
    return write_safetensors(tensors)


def entry(name, data=None):
    info = tarfile.TarInfo(name)
    info.mtime, info.uname, info.gname = MTIME, "root", "root"
    info.mode = 0o644
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size = len(data)
    return info, None if data is None else io.BytesIO(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("originals", type=pathlib.Path, nargs="+", help="their cases follow each other in the archive")
    args = parser.parse_args()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as out:
        for original in args.originals:
            with tarfile.open(original) as archive:
                files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
            for directory in sorted({pathlib.PurePath(name).parent for name in files}):
                out.addfile(*entry(f"{directory}/"))
            for name, data in sorted(files.items()):
                data = shrink(pathlib.PurePath(name).name, data)
                out.addfile(*entry(name, data))
    args.out.write_bytes(lzma.compress(packed.getvalue(), format=lzma.FORMAT_XZ, check=lzma.CHECK_CRC64, filters=FILTERS))
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
