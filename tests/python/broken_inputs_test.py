"""Broken inputs through the program: exit code 1, one clear line on stderr that names the thing, no crash, no hang.

Run with NIBBLE_BUILD_DIR pointing to the asan build to see that none of them touches wrong memory.
"""
import json, os, pathlib, shutil, struct, subprocess, sys
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build/release"))
NIBBLE = BUILD / "nibble"
DEMO = ROOT / "models/demo"
SMALL = BUILD / "golden/laguna-nvfp4"
SHARDED = BUILD / "golden/laguna-ct"


def nibble(*args, stdin="", code=1):
    """Runs the program; a bad input must leave exactly one line on stderr."""
    done = subprocess.run([NIBBLE, *map(str, args)], input=stdin.encode(), capture_output=True, timeout=120)
    err = done.stderr.decode(errors="replace")
    assert done.returncode == code, f"exit code {done.returncode}: {err[-2000:]}"
    if code == 1:
        lines = err.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("nibble: error: "), err[-2000:]
    return err


def read_header(path):
    raw = path.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:8 + n]), raw[8 + n:]


def write_file(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def small(tmp_path):
    """A copy of a small checkpoint that a test may break."""
    shutil.copytree(SMALL, tmp_path / "model")
    return tmp_path / "model"


def logits(model, *more):
    return nibble("logits", "-m", model, "--ids", "5,17,42", "-o", model.parent / "out.npy", *more)


EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


def edit_header(model, change):
    path = model / "model.safetensors"
    header, data = read_header(path)
    header, data = change(header, data) or (header, data)
    write_file(path, header, data)


def set_entry(name, **fields):
    def change(header, data):
        header[name].update(fields)
    return change


def rename(old, new):
    def change(header, data):
        header[new] = header.pop(old)
    return change


def nan_scale(header, data):
    at = header[EXPERT + ".weight_scale"]["data_offsets"][0]
    return header, data[:at + 5] + b"\x7f" + data[at + 6:]


def overlap(header, data):
    a, b = header["model.norm.weight"]["data_offsets"]
    header["model.norm.weight"]["data_offsets"] = [a - 2, b - 2]


HEADERS = {
    "wrong dtype": (set_entry("model.norm.weight", dtype="I16"), ["model.norm.weight", "I16"]),
    "unknown dtype": (set_entry("model.norm.weight", dtype="F7"), ["model.norm.weight", "F7"]),
    "wrong shape": (set_entry("model.norm.weight", shape=[64, 2]), ["model.norm.weight", "[128]", "[64, 2]"]),
    "negative size": (set_entry("model.norm.weight", shape=[-128]), ["model.norm.weight", "negative"]),
    "2^63": (set_entry("model.norm.weight", shape=[2**63]), ["model.norm.weight"]),
    "product overflows": (set_entry("model.norm.weight", shape=[2**40, 2**40]), ["model.norm.weight"]),
    "offsets reversed": (set_entry("model.norm.weight", data_offsets=[512, 256]), ["model.norm.weight"]),
    "offsets beyond the file": (set_entry("model.norm.weight", data_offsets=[0, 2**50]), ["model.norm.weight"]),
    "overlap": (overlap, ["model.norm.weight"]),
    "missing tensor": (rename("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.query.weight"),
                       ["model.layers.3.self_attn.q_proj"]),
    "unknown tensor": (rename("model.layers.2.mlp.experts.e_score_correction_bias", "model.layers.2.mlp.odd"),
                       ["model.layers.2.mlp.odd", "unknown"]),
    "missing scale": (rename(EXPERT + ".weight_scale", EXPERT + ".weight_skale"), [EXPERT, "weight_scale"]),
    "NaN scale": (nan_scale, [EXPERT + ".weight_scale", "NaN"]),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header(small, case):
    change, fragments = HEADERS[case]
    edit_header(small, change)
    err = logits(small)
    for fragment in [str(small), *fragments]:
        assert fragment in err, err


FILES = {
    "empty": b"",
    "seven bytes": b"\x01\x00\x00\x00\x00\x00\x00",
    "header beyond the file": struct.pack("<Q", 1 << 20) + b"{}",
    "header of 2^63": struct.pack("<Q", 1 << 63) + b"{}",
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "a list": struct.pack("<Q", 2) + b"[]",
    "deep": struct.pack("<Q", 100000) + b"[" * 100000,
    "no tensors": struct.pack("<Q", 2) + b"{}",
}


@pytest.mark.parametrize("case", FILES)
def test_whole_file(small, case):
    (small / "model.safetensors").write_bytes(FILES[case])
    assert ("model.safetensors" if case != "no tensors" else "model.embed_tokens.weight") in logits(small)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.999])
def test_truncated(small, keep):
    path = small / "model.safetensors"
    path.write_bytes(path.read_bytes()[:int(path.stat().st_size * keep)])
    assert "model.safetensors" in logits(small)


def test_truncated_shard(tmp_path):
    shutil.copytree(SHARDED, tmp_path / "model")
    path = tmp_path / "model/model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "model-00002-of-00003.safetensors" in logits(tmp_path / "model")


def test_missing_shard(tmp_path):
    shutil.copytree(SHARDED, tmp_path / "model")
    (tmp_path / "model/model-00003-of-00003.safetensors").unlink()
    assert "model-00003-of-00003.safetensors" in logits(tmp_path / "model")


def test_shard_outside_the_directory(tmp_path):
    shutil.copytree(SHARDED, tmp_path / "model")
    index = tmp_path / "model/model.safetensors.index.json"
    text = index.read_text().replace("model-00003-of-00003.safetensors", "../../secret.safetensors")
    index.write_text(text)
    assert "secret" in logits(tmp_path / "model")


CONFIGS = {
    "unknown rope type": (["rope_parameters", "full_attention", "rope_type"], "longrope", ["rope_type", "longrope"]),
    "unknown model": (["model_type"], "gpt2", ["model_type", "gpt2", "laguna"]),
    "negative width": (["hidden_size"], -128, ["hidden_size", "-128"]),
    "width of 2^63": (["hidden_size"], 2**63, ["hidden_size"]),
    "width no multiple of 16": (["moe_intermediate_size"], 72, [EXPERT]),
    "experts that are not there": (["num_experts"], 17, ["model.layers.1.mlp"]),
    "layers that are not there": (["num_hidden_layers"], 6, ["num_attention_heads_per_layer"]),
    "float for an integer": (["num_hidden_layers"], 5.5, ["num_hidden_layers"]),
    "string for a list": (["layer_types"], "full", ["layer_types"]),
    "activation": (["hidden_act"], "relu", ["hidden_act", "relu"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(small, case):
    keys, value, fragments = CONFIGS[case]
    config = json.loads((small / "config.json").read_text())
    inner = config
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (small / "config.json").write_text(json.dumps(config))
    err = logits(small)
    for fragment in fragments:
        assert fragment in err, err


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "[" * 100000, "\x00\x01"])
def test_config_that_is_none(small, text):
    (small / "config.json").write_text(text)
    assert "config.json" in logits(small)


def test_directory_without_config(tmp_path):
    assert "config.json" in nibble("run", "-m", tmp_path, "-p", "x")


def test_no_directory(tmp_path):
    assert "nowhere" in nibble("run", "-m", tmp_path / "nowhere", "-p", "x")
    assert "nowhere" in nibble("inspect", tmp_path / "nowhere")


def test_config_without_weights(small):
    (small / "model.safetensors").unlink()
    assert "safetensors" in logits(small)


@pytest.fixture
def demo(tmp_path):
    """The demo model with links to its files, any of which a test may replace."""
    model = tmp_path / "model"
    model.mkdir()
    for file in DEMO.iterdir():
        (model / file.name).symlink_to(file)
    return model


def replace(model, name, text):
    (model / name).unlink(missing_ok=True)
    (model / name).write_text(text)


TOKENIZERS = {
    "not JSON": "}{",
    "empty": "",
    "a number": "7",
    "no model": "{}",
    "vocab is a list": '{"model": {"type": "BPE", "vocab": [], "merges": []}}',
    "another model": '{"model": {"type": "Unigram", "vocab": []}}',
    "id of 2^63": '{"model": {"type": "BPE", "vocab": {"a": 9223372036854775808}, "merges": []}}',
    "negative id": '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    "deep": '{"model": ' + "[" * 100000,
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_tokenizer(demo, case):
    replace(demo, "tokenizer.json", TOKENIZERS[case])
    assert "tokenizer.json" in nibble("run", "-m", demo, "-p", "x", "-n", "1")
    assert "tokenizer.json" in nibble("tokenize", "-m", demo, "x")


TEMPLATES = {
    "loops for ever": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "grows for ever": "{% set ns = namespace(s='x') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "never closed": "{% for m in messages %}",
    "unknown filter": "{{ messages | sing }}",
    "raises": "{{ raise_exception('no such\nluck') }}",
    "nested": "{{ " + "(" * 60000 + "1" + ")" * 60000 + " }}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_template(demo, case):
    replace(demo, "chat_template.jinja", TEMPLATES[case])
    err = nibble("run", "-m", demo, "-sys", "You tell stories.", "-p", "x", "-n", "1", "--no-stats", code=1) \
        if case in ("never closed", "unknown filter", "nested") else \
        subprocess.run([NIBBLE, "run", "-m", str(demo), "--sys", "s", "-p", "x", "-n", "1"], capture_output=True, timeout=120)
    if not isinstance(err, str):
        assert err.returncode == 1, err.stderr[-2000:]
        lines = [l for l in err.stderr.decode().splitlines() if "error" in l]
        assert len(lines) == 1 and "chat_template" in lines[0], err.stderr
    else:
        assert "chat_template" in err


def test_generation_config(demo):
    replace(demo, "generation_config.json", '{"temperature": -1}')
    assert "temperature" in nibble("run", "-m", demo, "-p", "x", "-n", "1")


def test_tokenizer_larger_than_the_model(demo):
    config = json.loads((DEMO / "config.json").read_text())
    config["vocab_size"] = 4096
    replace(demo, "config.json", json.dumps(config))
    assert "4096" in nibble("run", "-m", demo, "-p", "x", "-n", "1")


FLAGS = [
    (["run", "-m", DEMO, "--tmep", "0", "-p", "x"], ["--tmep", "--temp"]),
    (["runn", "-m", DEMO], ["runn", "run"]),
    (["run", "-p", "x"], ["--model"]),
    (["run", "-m", DEMO, "-p", "x", "--temp", "warm"], ["--temp"]),
    (["run", "-m", DEMO, "-p", "x", "-n", "-5"], ["--predict", "-5"]),
    (["run", "-m", DEMO, "-p", "x", "--device", "abacus"], ["--device", "abacus"]),
    (["run", "-m", DEMO, "-p", "x", "--cpu-isa", "mmx"], ["mmx"]),
    (["run", "-m", DEMO, "-p", "x", "--cpu-activations", "int7"], ["int7", "exact,int8"]),
    (["logits", "-m", DEMO, "--ids", "5,x", "-o", "/dev/null"], ["--ids", "x"]),
    (["logits", "-m", DEMO, "-o", "/dev/null"], ["--ids"]),
    (["logits", "-m", DEMO, "--ids", "9000", "-o", "/dev/null"], ["9000", "8192"]),
    (["logits", "-m", DEMO, "--ids", "5", "-o", "/no/such/dir/x.npy"], ["/no/such/dir/x.npy"]),
    (["detokenize", "-m", DEMO, "99999999999999"], ["99999999999999"]),
    (["detokenize", "-m", DEMO, "8192"], ["8192"]),
    (["run", "-m", DEMO, "-f", "/no/such/file"], ["/no/such/file"]),
    (["run", "-m", DEMO, "-f", "/no/such/file", "-p", "x"], ["-p", "-f"]),
    ([], ["subcommand"]),
]


@pytest.mark.parametrize("case", range(len(FLAGS)))
def test_flags(case):
    args, fragments = FLAGS[case]
    err = nibble(*args)
    for fragment in fragments:
        assert fragment in err, err


@pytest.mark.parametrize("args,fragments", [
    (["-p", "x", "--top-p", "1.5"], ["top_p"]),
    (["-p", "", "-n", "1"], ["empty"]),
    (["-p", "word " * 300, "-c", "64"], ["context of 64", "-c"]),
    (["-p", "x", "-c", "100000000"], ["KV cache"]),
])
def test_requests(args, fragments):
    """Found after loading: the loading lines come first, then one error."""
    done = subprocess.run([NIBBLE, "run", "-m", str(DEMO), *args], capture_output=True, timeout=120)
    errors = [l for l in done.stderr.decode().splitlines() if l.startswith("nibble: error: ")]
    assert done.returncode == 1 and len(errors) == 1, done.stderr
    for fragment in fragments:
        assert fragment in errors[0], errors


def gguf_file(path, entries=(), tensors=()):
    """A GGUF file by the gguf package; entries of text, int, float."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    for key, value in entries:
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, shape in tensors:
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA = [("llama.block_count", 1), ("llama.context_length", 64), ("llama.embedding_length", 8),
         ("llama.feed_forward_length", 16), ("llama.attention.head_count", 2), ("llama.vocab_size", 3),
         ("llama.attention.layer_norm_rms_epsilon", 1e-5)]


@pytest.mark.parametrize("entries, tensors, fragment", [
    ([], [], "'llama.block_count'"),
    ([entry for entry in LLAMA if "embedding" not in entry[0]], [], "'llama.embedding_length'"),
    ([*LLAMA[1:], ("llama.block_count", 0)], [], "'llama.block_count': wanted"),
    ([*LLAMA, ("llama.rope.scaling.type", "longrope")], [], "'llama.rope.scaling.type': wanted one of none, yarn"),
    ([*LLAMA, ("llama.expert_count", 99999)], [], "'llama.expert_count': wanted"),
    ([*LLAMA, ("llama.residual_scale", 2.0)], [], "'llama.residual_scale' is unknown to model_type 'llama'"),
    (LLAMA, [], "tensor 'token_embd.weight': is missing"),
    (LLAMA, [("token_embd.weight", (3, 9))], "tensor 'token_embd.weight': wanted [3, 8]"),
])
def test_gguf_that_says_what_cannot_be(tmp_path, entries, tensors, fragment):
    path = gguf_file(tmp_path / "m.gguf", entries, tensors)
    for command in [["logits", "--ids", "1", "-o", tmp_path / "out.npy", "-m", path], ["convert", path, tmp_path / "dst"]]:
        err = nibble(*command)
        assert fragment in err and "m.gguf" in err, err
    nibble("inspect", path)
    assert not (tmp_path / "dst").exists()


def test_gguf_paths(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\2\0")
    assert "m.gguf" in nibble("run", "-m", tmp_path / "m.gguf", "-p", "x")
    (tmp_path / "n.gguf").write_bytes(b"")
    assert "holds several models: m.gguf, n.gguf" in nibble("run", "-m", tmp_path, "-p", "x")
    assert "no such directory" in nibble("run", "-m", tmp_path / "gone.gguf", "-p", "x")
    (tmp_path / "model.bin").write_bytes(b"")
    assert "is a file" in nibble("run", "-m", tmp_path / "model.bin", "-p", "x")


def test_logits_do_not_go_over_a_gguf_model(tmp_path):
    path = gguf_file(tmp_path / "m.gguf", LLAMA)
    before = path.read_bytes()
    assert "is a file of the model" in nibble("logits", "-m", path, "--ids", "1", "-o", path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_logits_do_not_go_over_a_model_by_another_name(small, tmp_path, kind):
    file = gguf_file(tmp_path / "m.gguf", LLAMA) if kind == "gguf" else small / "model.safetensors"
    model, before = file if kind == "gguf" else small, file.read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/soft.npy").symlink_to(file)
    os.link(file, tmp_path / "other/hard.npy")
    for name in ["soft.npy", "hard.npy"]:
        assert "is a file of the model" in nibble("logits", "-m", model, "--ids", "1", "-o", tmp_path / "other" / name)
        assert file.read_bytes() == before
