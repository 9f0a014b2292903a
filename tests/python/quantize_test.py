"""`nibble quantize` against a second implementation in numpy, the golden NVFP4 checkpoint, and a kill -9."""
import hashlib, json, os, pathlib, resource, shutil, signal, struct, subprocess, time
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build/release"))
NIBBLE = BUILD / "nibble"
LAGUNA = BUILD / "golden/laguna"
GOLDEN = BUILD / "golden/laguna-nvfp4"

NUMPY = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8, "U32": np.uint32}


def nibble(*args, code=0, **more):
    done = subprocess.run([NIBBLE, *map(str, args)], capture_output=True, timeout=120, **more)
    err = done.stderr.decode(errors="replace")
    assert done.returncode == code, f"exit code {done.returncode}: {err[-2000:]}"
    if code == 1:
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("nibble: error: "), err[-2000:]
    return err


def load(directory):
    """name -> (dtype, array) of all safetensors in a directory; arrays hold raw codes."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        if path.name.startswith("golden"):
            continue
        raw = path.read_bytes()
        n = struct.unpack("<Q", raw[:8])[0]
        for name, t in json.loads(raw[8:8 + n]).items():
            if name != "__metadata__":
                a, b = t["data_offsets"]
                array = np.frombuffer(raw[8 + n + a:8 + n + b], NUMPY[t["dtype"]]).reshape(t["shape"])
                tensors[name] = (t["dtype"], array)
    return tensors


def save(path, tensors):
    """Writes name -> (dtype, array)."""
    header, offset, data = {}, 0, []
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
        data.append(raw)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def tree_hash(directory):
    total = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        total.update(str(path.relative_to(directory)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def to_f32(dtype, array):
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)


# The codes from their definitions: sign, exponent, mantissa.
E2M1 = np.array([(m / 2 if e == 0 else (1 + m / 2) * 2.0**(e - 1)) for e in range(4) for m in range(2)], np.float64)
E4M3 = np.array([(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0**(e - 7)) for e in range(16) for m in range(8)][:127])
E8M0 = 2.0**(np.arange(255.0) - 127)


def nearest(values, table):
    """Indexes of the nearest of the ascending table; ties go to the even index."""
    x = np.abs(values.astype(np.float64))
    upper = np.clip(np.searchsorted(table, x), 1, len(table) - 1)
    lower = upper - 1
    below, above = x - table[lower], table[upper] - x
    return np.where((below < above) | ((below == above) & (lower % 2 == 0)), lower, upper)


def e2m1(values):
    return (nearest(values, E2M1) | (np.signbit(values) << 3)).astype(np.uint8)


def pack(codes):
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def numpy_nvfp4(w):
    scale_2 = max(np.abs(w).max() / np.float32(2688), np.float32(1e-12))
    blocks = w.reshape(*w.shape[:-1], -1, 16)
    scales = nearest(np.abs(blocks).max(-1) / np.float32(6) / scale_2, E4M3).astype(np.uint8)
    step = E4M3[scales].astype(np.float32) * scale_2
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(step[..., None] > 0, blocks / step[..., None], np.float32(0))
    return pack(e2m1(scaled).reshape(w.shape)), scales, scale_2


def numpy_mxfp4(w):
    blocks = w.reshape(*w.shape[:-1], -1, 32).astype(np.float64)
    amax = np.maximum(np.abs(blocks).max(-1), 2.0**-120)
    exponent = np.frexp(amax)[1] - 1 - 2
    return pack(e2m1(blocks / 2.0**exponent[..., None]).reshape(w.shape)), (exponent + 127).astype(np.uint8)


def numpy_q4(w):
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    d = np.abs(blocks).max(-1) / np.float32(7)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(d[..., None] > 0, blocks / d[..., None], np.float32(0)).astype(np.float64)
    q = np.clip(np.sign(q) * np.floor(np.abs(q) + 0.5), -7, 7).astype(np.int64) & 15
    words = q.reshape(*q.shape[:-1], 4, 8) << (4 * np.arange(8))
    return words.sum(-1).astype(np.uint32), d.astype(np.float16)


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory):
    out = tmp_path_factory.mktemp("nvfp4") / "out"
    nibble("quantize", LAGUNA, out, "--type", "nvfp4")
    return out


def test_nvfp4_equals_golden(nvfp4):
    ours, golden = load(nvfp4), load(GOLDEN)
    golden = {n: t for n, t in golden.items() if not n.endswith(".input_scale")}
    assert sorted(ours) == sorted(golden)
    assert sum(n.endswith(".weight_scale_2") for n in golden) == 192
    for name, (dtype, array) in golden.items():
        assert ours[name][0] == dtype and ours[name][1].shape == array.shape, name
        assert ours[name][1].tobytes() == array.tobytes(), name


def test_nvfp4_loads(nvfp4, tmp_path):
    """As far as a model without a tokenizer does; and the logits are those of the golden weights."""
    done = subprocess.run([NIBBLE, "inspect", nvfp4, "--json"], capture_output=True, timeout=120)
    report = json.loads(done.stdout)
    assert all("tokenizer.json" in problem for problem in report["problems"]), report["problems"]
    assert report["bytes"]["routed experts"].keys() == {"NVFP4"}
    assert report["weight_bytes_per_token"] > 0
    for model, name in [(nvfp4, "ours"), (GOLDEN, "golden")]:
        nibble("logits", "-m", model, "--ids", "5,17,42", "-o", tmp_path / f"{name}.npy")
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "golden.npy").read_bytes()


def test_all_linear_loads(tmp_path):
    nibble("quantize", LAGUNA, tmp_path / "out", "--type", "nvfp4", "--what", "all-linear")
    report = json.loads(subprocess.run([NIBBLE, "inspect", tmp_path / "out", "--json"], capture_output=True).stdout)
    assert all("tokenizer.json" in problem for problem in report["problems"]), report["problems"]
    for kind in ["routed experts", "shared expert", "attention", "dense feed-forward"]:
        assert report["bytes"][kind].keys() == {"NVFP4"}, kind
    for kind in ["embedding", "head", "router", "norms"]:
        assert report["bytes"][kind].keys() == {"BF16"}, kind
    config = json.loads((tmp_path / "out/config.json").read_text())
    excluded = {f"model.layers.{i}.mlp.gate" for i in range(1, 5)} | {"lm_head", "model.embed_tokens"}
    assert set(config["quantization_config"]["exclude_modules"]) == excluded


def decode_mxfp4(codes, scales):
    values = np.concatenate([E2M1, -E2M1]).astype(np.float32)
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    return values[pairs] * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, axis=-1)


def decode_q4(words, scales):
    nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.int32)
    codes = (nibbles - 16 * (nibbles > 7)).reshape(words.shape[0], -1)
    return codes.astype(np.float32) * np.repeat(scales.astype(np.float32), 32, axis=-1)


@pytest.mark.parametrize("kind,codes,decode,name", [("mxfp4", "_packed", decode_mxfp4, "MXFP4"),
                                                    ("q4", "_q4", decode_q4, "q4")])
def test_others_load(tmp_path, kind, codes, decode, name):
    """The logits are those of the same model with the codes' values in F32."""
    nibble("quantize", LAGUNA, tmp_path / "out", "--type", kind)
    report = json.loads(subprocess.run([NIBBLE, "inspect", tmp_path / "out", "--json"], capture_output=True).stdout)
    assert all("tokenizer.json" in problem for problem in report["problems"]), report["problems"]
    assert report["bytes"]["routed experts"].keys() == {name}
    tensors = load(tmp_path / "out")
    for module in [n.removesuffix(codes) for n in tensors if n.endswith(".weight" + codes)]:
        values = decode(tensors.pop(module + codes)[1], tensors.pop(module + "_scale")[1])
        tensors[module] = ("F32", values)
    # In a file tensors are aligned to their elements.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1][1].itemsize))
    (tmp_path / "plain").mkdir()
    shutil.copy(LAGUNA / "config.json", tmp_path / "plain")
    save(tmp_path / "plain/model.safetensors", tensors)
    logits = {}
    for model in ["out", "plain"]:
        nibble("logits", "-m", tmp_path / model, "--ids", "5,17,42", "-o", tmp_path / "x.npy")
        logits[model] = np.load(tmp_path / "x.npy")
    assert np.abs(logits["out"] - logits["plain"]).max() <= 2e-5 * np.abs(logits["plain"]).max()


CODECS = {"nvfp4": numpy_nvfp4, "mxfp4": numpy_mxfp4, "q4": numpy_q4}
NAMES = {"nvfp4": ["", "_scale", "_scale_2"], "mxfp4": ["_packed", "_scale"], "q4": ["_q4", "_scale"]}


def hard_matrices():
    """Values that sit on every edge: ties of every code, powers of two, zeros, tiny and huge blocks."""
    rng = np.random.default_rng(3)
    ties = np.concatenate([np.arange(-24, 24) / 4, np.arange(-16, 16) / 2])[:64]
    f32 = np.concatenate([rng.normal(0, s, (4, 64)) for s in [1e-30, 1e-3, 1, 1e4, 1e30]]).astype(np.float32)
    f16 = np.stack([ties * s for s in [2.0**-12, 1, 3, 512]] + [np.zeros(64), -np.zeros(64)]).astype(np.float16)
    bits = rng.integers(0, 1 << 16, (64, 64)).astype(np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] = 0
    moderate = (rng.normal(0, 0.02, (64, 96)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return {"f32": ("F32", f32), "f16": ("F16", f16), "bits": ("BF16", bits), "moderate": ("BF16", moderate),
            "zeros": ("F32", np.zeros((2, 32), np.float32))}


@pytest.mark.parametrize("kind", CODECS)
def test_equals_numpy(tmp_path, kind):
    source = tmp_path / "src"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "laguna"}')
    weights = {f"x.experts.{i}.{n}.weight": t for i, (n, t) in enumerate(hard_matrices().items())}
    save(source / "model.safetensors", weights)
    nibble("quantize", source, tmp_path / "out", "--type", kind)
    ours = load(tmp_path / "out")
    for name, (dtype, array) in weights.items():
        with np.errstate(over="ignore"):
            wanted = CODECS[kind](to_f32(dtype, array))
        for ending, part in zip(NAMES[kind], wanted):
            found = ours[name + ending][1]
            part = np.minimum(part, np.float16(65504)) if part.dtype == np.float16 else part
            bad = np.argwhere(found.reshape(np.shape(part)) != part)
            assert len(bad) == 0, f"{name}{ending}: {len(bad)} differ, first at {bad[0]}"


def test_gpt_oss_equals_numpy(tmp_path):
    source = tmp_path / "src"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt_oss"}')
    rng = np.random.default_rng(4)
    base = "model.layers.0.mlp.experts."
    weights = {base + n: ("BF16", (rng.normal(0, 0.1, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16))
               for n, shape in [("gate_up_proj", (3, 64, 96)), ("down_proj", (3, 32, 64))]}
    save(source / "model.safetensors", weights)
    nibble("quantize", source, tmp_path / "out", "--type", "mxfp4")
    ours = load(tmp_path / "out")
    for name, (dtype, array) in weights.items():
        codes, scales = numpy_mxfp4(np.ascontiguousarray(to_f32(dtype, array).transpose(0, 2, 1)))
        e, n, half = codes.shape
        assert np.array_equal(ours[name + "_blocks"][1], codes.reshape(e, n, half // 16, 16)), name
        assert np.array_equal(ours[name + "_scales"][1], scales), name


@pytest.mark.parametrize("kind", CODECS)
def test_threads(tmp_path, kind):
    hashes = set()
    for threads in [1, 2, 3, 7]:
        nibble("quantize", LAGUNA, tmp_path / str(threads), "--type", kind, "-t", threads, "--max-shard-size", "200KB")
        hashes.add(tree_hash(tmp_path / str(threads)))
    assert len(hashes) == 1


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """Large enough for kills to land inside."""
    source = tmp_path_factory.mktemp("larger")
    (source / "config.json").write_text('{"model_type": "laguna"}')
    rng = np.random.default_rng(5)
    save(source / "model.safetensors", {
        f"model.layers.0.mlp.experts.{i}.up_proj.weight": ("BF16", rng.integers(0x3C00, 0x3D00, (512, 1024)).astype(np.uint16))
        for i in range(32)})
    return source


@pytest.mark.parametrize("first_ms", [20, 60])
def test_kill_and_resume(tmp_path, larger, first_ms):
    """Wherever the kills land: the bytes are those of a run without any."""
    args = ["--type", "nvfp4", "-t", "2", "--max-shard-size", "1MB"]
    nibble("quantize", larger, tmp_path / "whole", *args)
    delay, kills = first_ms / 1000, 0
    for _ in range(60):
        process = subprocess.Popen([NIBBLE, "quantize", str(larger), str(tmp_path / "out"), *args], stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=delay)
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += process.wait() == -signal.SIGKILL
            assert not (tmp_path / "out/config.json").exists() or not (tmp_path / "out/.partial/files/config.json").exists()
            delay *= 1.15
    assert kills > 0 and process.returncode == 0
    assert tree_hash(tmp_path / "out") == tree_hash(tmp_path / "whole")


def test_file_size_limit(tmp_path, larger):
    """A write that fails half-way, as on a full disk: one line, and a later run goes on."""
    limit = 3 << 20
    error = nibble("quantize", larger, tmp_path / "out", "--type", "nvfp4", code=1, restore_signals=False,
                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert "model.safetensors" in error and "File too large" in error
    assert not (tmp_path / "out/config.json").exists()
    nibble("quantize", larger, tmp_path / "out", "--type", "nvfp4")
    nibble("quantize", larger, tmp_path / "whole", "--type", "nvfp4")
    assert tree_hash(tmp_path / "out") == tree_hash(tmp_path / "whole")


def test_memory_is_bounded(tmp_path, larger):
    """Address space for code, stacks and the mapped source, and little more."""
    source_bytes = (larger / "model.safetensors").stat().st_size
    script = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); " \
             "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    done = subprocess.run([shutil.which("python3"), "-c", script, NIBBLE, "quantize", larger, tmp_path / "out", "--type", "q4",
                           "-t", "1"], capture_output=True, check=True)
    if "asan" not in BUILD.name and "tsan" not in BUILD.name:
        assert int(done.stdout) * 1024 < source_bytes, "the whole model was in memory"


ERRORS = [
    ("no source", lambda d: shutil.rmtree(d / "src"), [], ["src", "no such directory"]),
    ("no config", lambda d: (d / "src/config.json").unlink(), [], ["config.json", "missing"]),
    ("no weights", lambda d: (d / "src/model.safetensors").unlink(), [], ["src", "model.safetensors"]),
    ("cut", lambda d: os.truncate(d / "src/model.safetensors", 100_000), [], ["model.safetensors"]),
    ("quantized", lambda d: (shutil.rmtree(d / "src"), shutil.copytree(GOLDEN, d / "src")), [], ["already quantized", "modelopt"]),
    ("not empty", lambda d: ((d / "out").mkdir(), (d / "out/x").write_text("")), [], ["out", "not empty", "'x'"]),
    ("a file", lambda d: (d / "out").write_text(""), [], ["out", "no directory"]),
    ("type", lambda d: None, ["--type", "int3"], ["--type", "int3", "nvfp4"]),
    ("what", lambda d: None, ["--what", "everything"], ["--what", "everything"]),
    ("size", lambda d: None, ["--max-shard-size", "0"], ["--max-shard-size"]),
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: case[0])
def test_errors(tmp_path, case):
    _, change, more, fragments = case
    shutil.copytree(LAGUNA, tmp_path / "src")
    change(tmp_path)
    error = nibble("quantize", tmp_path / "src", tmp_path / "out", *([] if "--type" in more else ["--type", "q4"]), *more, code=1)
    for fragment in fragments:
        assert fragment in error, error
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("destination", [".", "./", "link", "below", "../src"])
def test_destination_is_the_source(tmp_path, destination):
    source = tmp_path / "src"
    shutil.copytree(LAGUNA, source)
    (source / "link").symlink_to(source)
    before = tree_hash(source)
    error = nibble("quantize", ".", destination, "--type", "q4", code=1, cwd=source)
    assert "source" in error, error
    assert tree_hash(source) == before


def test_nan_is_named(tmp_path):
    shutil.copytree(LAGUNA, tmp_path / "src")
    tensors = load(LAGUNA)
    name = "model.layers.2.mlp.experts.7.up_proj.weight"
    bad = tensors[name][1].copy()
    bad[3, 5] = 0x7FC0
    save(tmp_path / "src/model.safetensors", {**tensors, name: ("BF16", bad)})
    for kind in CODECS:
        error = nibble("quantize", tmp_path / "src", tmp_path / "out", "--type", kind, code=1)
        assert name in error and "nan" in error and "[3, 5]" in error, error
        assert not (tmp_path / "out").exists()
