"""The program from outside: what its commands print, that flags and environment do what they say, the chat at a terminal."""
import json, os, pathlib, pty, re, select, signal, struct, subprocess, time
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build/release"))
NIBBLE = str(BUILD / "nibble")
DEMO = str(ROOT / "models/demo")
SMALL = BUILD / "golden/laguna-nvfp4"


def nibble(*args, env=None, stdin=None):
    done = subprocess.run([NIBBLE, *map(str, args)], capture_output=True, timeout=300, input=stdin,
                          env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def story(*args, **more):
    return nibble("run", "-m", DEMO, "-p", "Once upon a time", "-n", "16", "--no-stats", *args, **more)


def test_version_and_help():
    assert re.fullmatch(r"nibble \d+\.\d+\.\d+\n", nibble("--version"))
    for command in ["run", "inspect", "logits", "bench", "tokenize", "detokenize", "quantize", "convert", "doctor"]:
        assert command in nibble("--help")
        assert "--help" in nibble(command, "--help")


def test_same_seed_same_text_whatever_the_machine_does():
    texts = {story("--seed", "7", *flags) for flags in
             [[], ["-t", "1"], ["-t", "3"], ["--prefill-chunk", "1"], ["-b", "3"], ["-c", "64"]]}
    assert len(texts) == 1
    assert story("--seed", "8") not in texts


def test_environment_and_flags():
    greedy = story("--temp", "0")
    assert story(env={"NIBBLE_TEMP": "0"}) == greedy
    assert story("--temp", "0", "--seed", "1", env={"NIBBLE_TEMP": "5"}) == greedy


def test_arithmetic_of_experts():
    greedy = ["--temp", "0", "--moe-arith", "w4a4"]
    row = story(*greedy)
    assert row != story("--temp", "0")
    assert story(*greedy, "--act-scale", "row") == row
    assert story("--temp", "0", env={"NIBBLE_MOE_ARITH": "w4a4"}) == row
    # Every report names it where it is not the usual one.
    args = ["run", "-m", DEMO, "-p", "Once", "-n", "2", "--moe-arith", "w4a4"]
    assert json.loads(nibble(*args, "--json"))["moe_arith"] == "w4a4, scale row"
    done = subprocess.run([NIBBLE, *args, "--act-scale", "static"], capture_output=True, timeout=300)
    assert done.returncode == 0 and b"; experts in w4a4, scale static\n" in done.stderr
    for flags, words in [(["--act-scale", "unit"], ["--act-scale unit", "wanted --moe-arith w4a4"]),
                         (["--moe-arith", "w4a8"], ["w4a8", "w4a16,w4a4"]),
                         (["--moe-arith", "w4a4", "--act-scale", "column"], ["column", "row,static,unit"])]:
        done = subprocess.run([NIBBLE, "run", "-m", DEMO, "-p", "Once", *flags], capture_output=True, timeout=300)
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1
        assert all(word in done.stderr.decode() for word in words), done.stderr


def test_logits_in_both_arithmetics(tmp_path):
    results = []
    for arithmetic in [["w4a16"], ["w4a4"], ["w4a4", "--act-scale", "static"], ["w4a4", "--act-scale", "unit"]]:
        nibble("logits", "-m", SMALL, "--ids", "5,17,42", "-o", tmp_path / "out.npy", "--moe-arith", *arithmetic)
        results.append(np.load(tmp_path / "out.npy"))
        assert np.isfinite(results[-1]).all()
        assert not any(np.array_equal(results[-1], other) for other in results[:-1]), arithmetic
    for model, words in [("laguna", ["'model.layers.1.mlp.experts.0.gate_proj' is BF16", "W4A4 wants"]),
                         ("gpt_oss-mxfp4", ["is MXFP4", "W4A4 wants"])]:
        done = subprocess.run([NIBBLE, "logits", "-m", BUILD / "golden" / model, "--ids", "5", "-o", tmp_path / "no.npy",
                               "--moe-arith", "w4a4"], capture_output=True, timeout=300)
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1
        assert all(word in done.stderr.decode() for word in words), done.stderr


def test_stop_strings_and_limits():
    text = story("--temp", "0")
    word = text.split()[5]
    assert story("--temp", "0", "--stop", word) == text[:text.index(word)] + "\n"
    answer = json.loads(nibble("run", "-m", DEMO, "-p", "Once upon a time", "-n", "5", "--json"))
    assert answer["generated_tokens"] == 5 and answer["prompt_tokens"] == 4


def test_prompt_from_a_file_and_from_a_pipe(tmp_path):
    (tmp_path / "prompt").write_text("Once upon a time")
    args = ["run", "-m", DEMO, "-n", "8", "--temp", "0", "--no-stats"]
    assert nibble(*args, "-f", tmp_path / "prompt") == nibble(*args, "-f", "-", stdin=b"Once upon a time")


def test_tokenize_and_back():
    text = "naïve café 日本語 🚀 <|user|>\n"
    ids = json.loads(nibble("tokenize", "-m", DEMO, "--json", "-p", text))
    assert nibble("detokenize", "-m", DEMO, ",".join(map(str, ids))) == text + "\n"
    assert nibble("tokenize", "-m", DEMO, stdin=text.encode()).strip() == ",".join(map(str, ids))


def test_inspect():
    report = json.loads(nibble("inspect", DEMO, "--json", "--tensors"))
    assert report["architecture"] == "laguna" and report["problems"] == [] and report["chat_template"]
    assert len(report["tensors"]) == 1519
    assert sum(t["bytes"] for t in report["tensors"]) == report["total_bytes"]
    assert sum(b for kinds in report["bytes"].values() for b in kinds.values()) == report["total_bytes"]
    assert "loads          yes" in nibble("inspect", DEMO)


def golden(name):
    raw = (SMALL / "golden.safetensors").read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    entry = json.loads(raw[8:8 + n])[name]
    begin, end = entry["data_offsets"]
    dtype = {"F32": "<f4", "I32": "<i4"}[entry["dtype"]]
    return np.frombuffer(raw[8 + n + begin:8 + n + end], dtype).reshape(entry["shape"])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_logits_against_the_golden_file_in_any_chunks(tmp_path, device):
    ids = ",".join(map(str, golden("prompt.0")))
    found = []
    for chunk in [1, 3, 23, 24, 25, 70]:
        nibble("logits", "-m", SMALL, "--ids", ids, "--device", device, "--prefill-chunk", chunk, "-o", tmp_path / "x.npy")
        found.append(np.load(tmp_path / "x.npy"))
    wanted = golden("logits.0")
    assert found[0].dtype == np.float32 and found[0].shape == wanted.shape
    assert all(np.array_equal(found[0], other) for other in found)
    assert (np.abs(found[0] - wanted).max(1) / np.abs(wanted).max(1)).max() < 2e-5


def test_activations_in_8_bits(tmp_path):
    # The reports name it, and its error is printed once: a measured one, of each format that is rounded.
    flags = ["-m", DEMO, "--cpu-activations", "int8"]
    done = subprocess.run([NIBBLE, "run", *flags, "-p", "Once", "-n", "2", "--json"], capture_output=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["cpu_activations"] == "int8"
    errors = re.findall(r"activations are rounded: .* off by .*?(\S+)% \(at worst (\S+)%\) in NVFP4", done.stderr.decode())
    assert len(errors) == 1 and 0.1 < float(errors[0][0]) < 2 < float(errors[0][1]) < 10
    exact = subprocess.run([NIBBLE, "run", "-m", DEMO, "-p", "Once", "-n", "2", "--json"], capture_output=True, timeout=300)
    assert json.loads(exact.stdout)["cpu_activations"] == "exact" and b"rounded" not in exact.stderr
    bench = ["bench", *flags, "-p", "4", "-n", "0", "-r", "1"]
    report = json.loads(nibble(*bench, "--json"))
    assert report["cpu_activations"] == "int8" and "int8" in report["description"]
    error = next(e for e in report["rounding_errors"] if e["format"] == "NVFP4")
    assert f"{error['rms'] * 100:.2f}" == errors[0][0] and error["worst"] > error["rms"]
    assert "Activations: int8; random products are off by" in nibble(*bench)
    # Other logits, whatever the chunk; the reference has no such mode.
    for name, more in [("a", flags[2:]), ("b", [*flags[2:], "--prefill-chunk", "3"]), ("exact", [])]:
        nibble("logits", "-m", DEMO, "--ids", "5,17,42,8,100", "-o", tmp_path / name, *more)
    a, b, exact = ((tmp_path / name).read_bytes() for name in ("a", "b", "exact"))
    assert a == b != exact
    done = subprocess.run([NIBBLE, "run", *flags, "-p", "x", "--device", "reference"], capture_output=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1
    assert b"cpu-activations int8" in done.stderr and b"'reference'" in done.stderr


def test_the_forced_instruction_set_runs():
    report = nibble("doctor", "--device", "cpu")
    best, all_here = re.search(r"^ +kernels: (\S+), the first that machine and build have of (.+)$", report, re.M).groups()
    names = all_here.split(", ")
    assert names[0] == best and names[-1] == "generic"
    args = ["run", "-v", "-m", DEMO, "-p", "Once", "-n", "2", "--temp", "0"]
    for flags, env, isa, why in [*(([f"--cpu-isa={n}"], {}, n, "as asked;") for n in names),
                                 ([], {"NIBBLE_CPU_ISA": names[-1]}, names[-1], "as asked;"), ([], {}, best, "the first that")]:
        done = subprocess.run([NIBBLE, *args, *flags], capture_output=True, timeout=300, env={**os.environ, **env})
        assert done.returncode == 0, done.stderr
        lines = done.stderr.decode()
        assert re.search(rf"^nibble: debug: cpu \({isa}\), ", lines, re.M) and f"debug: kernels: {isa}, {why}" in lines, lines
    done = subprocess.run([NIBBLE, *args, "--cpu-isa", "mmx"], capture_output=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and all_here.encode() in done.stderr


def test_doctor_says_what_is_here_and_what_is_not():
    report = nibble("doctor")
    for device in ["cpu", "cuda", "reference"]:
        assert re.search(rf"^{device}\s+\S", report, re.M)
    assert re.search(r"^cpu .*\n( +(kernels|activations).*\n)+ +self-test passed$", report, re.M)
    cuda = subprocess.run([NIBBLE, "doctor", "--device", "cuda"], capture_output=True, timeout=300)
    if re.search("^cuda +not here", report, re.M):
        assert cuda.returncode == 1 and re.fullmatch(r".*CUDA.*\n", cuda.stderr.decode())
    else:
        assert cuda.returncode == 0 and "self-test passed" in cuda.stdout.decode()
        assert re.search("^ +products with BF16: ", cuda.stdout.decode(), re.M)


def test_bench():
    flags = ["bench", "-m", DEMO, "-p", "20", "-n", "6", "-b", "1,3", "-r", "2", "--prefill-chunk", "8"]
    report = json.loads(nibble(*flags, "--json"))
    assert report["model"] == DEMO and report["device"] == "cpu" and report["read_ceiling_bytes_per_second"] > 0
    assert [(t["test"], t["batch"], t["tokens"], t["steps"]) for t in report["tests"]] == [
        ("pp20", 1, 20, 3), ("tg6", 1, 6, 6), ("tg6", 3, 18, 6)]
    per_token = json.loads(nibble("inspect", DEMO, "--json"))["weight_bytes_per_token"]
    assert report["tests"][1]["weight_bytes_per_token"] == per_token > report["tests"][2]["weight_bytes_per_token"]
    for t in report["tests"]:
        low, high = sorted(t["seconds"])
        assert len(t["seconds"]) == 2 and 0 < low <= high
        assert t["tokens_per_second"] == pytest.approx(t["tokens"] / high)
        assert t["lowest_tokens_per_second"] <= t["tokens_per_second"] <= t["highest_tokens_per_second"]
        assert t["ms_per_step"] == pytest.approx(high / t["steps"] * 1000)
        rate = t["weight_bytes_per_token"] * t["tokens_per_second"]
        assert t["weight_bytes_per_second"] == pytest.approx(rate)
        assert t["share_of_read_ceiling"] == pytest.approx(rate / report["read_ceiling_bytes_per_second"])
    # The table has a head, a line below it, and a row a test of as many cells.
    lines = nibble(*flags).split("\n\n")[0].split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 5 and len({len(row) for row in rows}) == 1
    assert [row[2:4] for row in rows[2:]] == [["pp20", "1"], ["tg6", "1"], ["tg6", "3"]]
    assert all(float(cell.rstrip("%")) > 0 for row in rows[2:] for cell in row[4:5] + row[6:])


@pytest.mark.parametrize("flags, words", [
    (["-m", DEMO, "-p", "0", "-n", "0"], ["-p 0", "-n 0"]),
    (["-m", DEMO, "-b", "0"], ["--batch", "0"]),
    (["-m", DEMO, "-b", "1,x"], ["--batch", "x"]),
    (["-m", DEMO, "-b", "1,,2"], ["--batch", "''", "1,,2"]),
    (["-m", DEMO, "-b", "1,"], ["--batch", "'1,'"]),
    (["-m", DEMO, "-b", ""], ["--batch"]),
    (["-m", DEMO, "-b", "1025"], ["--batch", "1 to 1024", "1025"]),
    (["-m", DEMO, "-r", "0"], ["--repetitions"]),
    (["-m", "synthetic:laguna-xs.2:layers=2:experts=8", "-p", "0", "-n", "100000", "-b", "1024"],
     ["KV cache and activations", "wanted", "available"]),
    (["-m", DEMO, "-p", "100000000"], ["pp100000000", "positions"]),
    (["-m", DEMO, "--bach", "1"], ["--bach", "--batch"]),
    (["-m", DEMO, "--moe-path", "few"], ["moe-path few: wanted device 'cuda'"]),
    (["-m", DEMO, "--moe-path", "grouped"], ["grouped", "auto,few,many,portable"]),
    (["-m", "synthetic:laguna-m.1"], ["synthetic:laguna-m.1", "synthetic:laguna-s-2.1"]),
    (["-m", "synthetic:laguna-xs.2:layers=99"], ["layers=99", "1 to 40"]),
])
def test_bench_refuses_in_one_line(flags, words):
    done = subprocess.run([NIBBLE, "bench", *flags], capture_output=True, timeout=300)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and done.stdout == b""
    assert all(word in done.stderr.decode() for word in words), done.stderr


def test_synthetic_models_compute_and_have_no_text(tmp_path):
    model = "synthetic:laguna-xs.2:layers=2:experts=8"
    results = []
    for device in ["cpu", "cpu", "reference"]:
        nibble("logits", "-m", model, "--device", device, "--ids", "5,100351", "-o", tmp_path / "out.npy")
        results.append(np.load(tmp_path / "out.npy"))
    assert results[0].shape == (2, 100352) and np.isfinite(results[0]).all()
    assert np.array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() < 2e-5 * np.abs(results[2]).max()
    for command in [["run", "-p", "Once"], ["run"], ["tokenize", "-p", "Once"]]:
        done = subprocess.run([NIBBLE, command[0], "-m", model, *command[1:]], capture_output=True, timeout=300)
        assert done.returncode == 1 and done.stderr.count(b"\n") == 1
        assert "is synthetic and has no tokenizer" in done.stderr.decode(), done.stderr
    done = subprocess.run([NIBBLE, "convert", model, tmp_path / "out"], capture_output=True, timeout=300)
    assert done.returncode == 1 and b"nothing to convert" in done.stderr and done.stderr.count(b"\n") == 1


class Terminal:
    """A program at a terminal of its own."""

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(LC_ALL="C.UTF-8", TERM="dumb")
            os.execv(NIBBLE, [NIBBLE, *args])
        self.seen = ""

    def read_until(self, pattern, seconds=60):
        end = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:
                    break
        found, self.seen = self.seen, ""
        return found

    def type(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_chat_at_a_terminal():
    chat = Terminal("run", "-m", DEMO, "-n", "12", "--temp", "0")
    chat.read_until("> ")
    chat.type("Tell me a story about a fox.\n")
    chat.read_until(r"tok/s(.|\n)*> ")
    chat.type("half a line")
    chat.read_until("half a line")
    time.sleep(0.5)  # the line editor shows the prompt a moment before it reads
    chat.type("\x03")  # Ctrl-C at the prompt drops the line, not the program
    chat.read_until("> ")
    chat.type("/clear\n")
    chat.read_until("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_stops_the_answer_not_the_program():
    chat = Terminal("run", "-m", DEMO, "--ignore-eos", "-c", "1000", "--temp", "0")
    chat.read_until("> ")
    chat.type("Tell me a story.\n")
    chat.read_until(r"story\.\r\n.*\w")  # it has begun
    os.kill(chat.pid, signal.SIGINT)
    chat.read_until(r"decode(.|\n)*> ")
    chat.type("/exit\n")
    assert chat.exit_code() == 0


def test_chat_takes_every_character(tmp_path):
    (tmp_path / "echo.jinja").write_text("{{ raise_exception('<' ~ messages[-1].content ~ '>') }}")
    chat = Terminal("run", "-m", DEMO, "--chat-template", str(tmp_path / "echo.jinja"))
    chat.read_until("> ")
    chat.type("héé ü 漢字 😀\n")
    assert "<héé ü 漢字 😀>" in chat.read_until("error.*>")
    assert chat.exit_code() == 1
