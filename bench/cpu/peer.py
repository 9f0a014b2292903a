#!/usr/bin/env python3
"""The same shapes, made up, through llama.cpp (the package xllamacpp) and through nibble, on the same threads.

  bench/cpu/peer.py --type mxfp4 --threads 2 --work DIR

writes a qwen3moe GGUF of random weights (experts in --type, the rest BF16) to --work, converts it for nibble
(NVFP4 and MXFP4 keep every bit; q4_0 becomes NVFP4, which has as many bits) and prints a line for prompt and
decoding: tokens a second, the best of --repetitions. Needs the Python packages numpy, gguf and xllamacpp.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

WIDTH, HEADS, KV_HEADS, HEAD_DIM, EXPERT_WIDTH, CHOSEN, VOCAB = 2048, 48, 8, 128, 512, 8, 32768


def write_model(path, layers, experts, kind):
    import gguf
    import numpy

    random = numpy.random.default_rng(1)
    types = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(EXPERT_WIDTH * CHOSEN)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(CHOSEN)
    # A vocabulary that both take: the 256 bytes, and words that no merge makes.
    letters = [c for c in range(256) if 33 <= c <= 126 or 161 <= c <= 172 or 174 <= c]
    others = [c for c in range(256) if c not in letters]
    bytes_ = [chr(c) for c in letters] + [chr(256 + i) for i in range(len(others))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(bytes_ + [f"word{i}" for i in range(VOCAB - 256)])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(VOCAB - 1)

    def vector(name, n):
        writer.add_tensor(name, numpy.ones(n, numpy.float32))

    def bf16(name, n, k):
        values = (random.standard_normal((n, k), numpy.float32) / k**0.5).view(numpy.uint32) >> 16
        writer.add_tensor(name, values.astype(numpy.uint16).view(numpy.uint8), raw_dtype=types.BF16)

    def expert(name, n, k):
        columns, scales = {"q4_0": (32, [0x00, 0x22]), "mxfp4": (32, [121]), "nvfp4": (64, [24] * 4)}[kind]
        size = columns // 2 + len(scales)
        blocks = random.integers(0, 256, (experts, n, k // columns, size), numpy.uint8)
        blocks[..., : len(scales)] = scales
        writer.add_tensor(name, blocks.reshape(experts, n, -1), raw_dtype=types[kind.upper()])

    bf16("token_embd.weight", VOCAB, WIDTH)
    bf16("output.weight", VOCAB, WIDTH)
    vector("output_norm.weight", WIDTH)
    for i in range(layers):
        blk = f"blk.{i}."
        vector(blk + "attn_norm.weight", WIDTH)
        vector(blk + "ffn_norm.weight", WIDTH)
        vector(blk + "attn_q_norm.weight", HEAD_DIM)
        vector(blk + "attn_k_norm.weight", HEAD_DIM)
        bf16(blk + "attn_q.weight", HEADS * HEAD_DIM, WIDTH)
        bf16(blk + "attn_k.weight", KV_HEADS * HEAD_DIM, WIDTH)
        bf16(blk + "attn_v.weight", KV_HEADS * HEAD_DIM, WIDTH)
        bf16(blk + "attn_output.weight", WIDTH, HEADS * HEAD_DIM)
        router = random.standard_normal((experts, WIDTH), numpy.float32) / WIDTH**0.5
        writer.add_tensor(blk + "ffn_gate_inp.weight", router)
        expert(blk + "ffn_gate_exps.weight", EXPERT_WIDTH, WIDTH)
        expert(blk + "ffn_up_exps.weight", EXPERT_WIDTH, WIDTH)
        expert(blk + "ffn_down_exps.weight", WIDTH, EXPERT_WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_peer(args):
    """In a process of its own: prints {"pp": ..., "tg": ...}."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(args.peer)
    params.n_ctx = args.prompt + args.decode + 64
    params.n_parallel = 1
    params.n_batch = params.n_ubatch = 256
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.n_gpu_layers = 0
    params.fit_params = False
    server = xllamacpp.Server(params)
    best = {"pp": 0.0, "tg": 0.0}
    for turn in range(args.repetitions + 1):  # the first one warms up
        ids = [(turn * 7919 + i * 104729) % (VOCAB - 300) + 256 for i in range(args.prompt)]
        answer = server.handle_completions(
            {"prompt": ids, "n_predict": args.decode, "ignore_eos": True, "cache_prompt": False, "top_k": 1})
        timings = (json.loads(answer) if isinstance(answer, (str, bytes)) else answer)["timings"]
        if timings["predicted_n"] != args.decode or timings["prompt_n"] != args.prompt:
            sys.exit(f"peer: wanted {args.prompt} and {args.decode} tokens, found {timings}")
        if turn > 0:
            best["pp"] = max(best["pp"], timings["prompt_per_second"])
            # Its first token comes from the prompt's logits and took no step.
            best["tg"] = max(best["tg"], (args.decode - 1) * 1000 / timings["predicted_ms"])
    print("peer " + json.dumps(best))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", choices=["q4_0", "mxfp4", "nvfp4"], default="mxfp4")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--activations", choices=["exact", "int8"], default="exact", help="nibble's")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="directory for the models")
    parser.add_argument("--nibble", default=pathlib.Path(__file__).parents[2] / "build/release/nibble")
    parser.add_argument("--peer", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return run_peer(args)

    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / f"qwen3moe-{args.layers}x{args.experts}-{args.type}.gguf"
    if not model.exists():
        write_model(model.with_suffix(".part"), args.layers, args.experts, args.type)
        model.with_suffix(".part").rename(model)
    converted = model.with_suffix("")
    if not (converted / "config.json").exists():
        command = [args.nibble, "convert", model, converted]
        subprocess.run(command + (["--type", "nvfp4"] if args.type == "q4_0" else []), check=True)

    peer = subprocess.run([sys.executable, __file__, "--peer", model, *sys.argv[1:]], text=True, capture_output=True)
    if peer.returncode != 0:
        sys.exit(peer.stderr)
    theirs = json.loads(re.search(r"^peer (.*)$", peer.stdout, re.M).group(1))
    bench = subprocess.run(
        [args.nibble, "bench", "-m", converted, "-p", str(args.prompt), "-n", str(args.decode), "-t",
         str(args.threads), "-r", str(args.repetitions), "--cpu-activations", args.activations, "--json"],
        check=True, text=True, stdout=subprocess.PIPE)
    ours = {test["test"][:2]: test["highest_tokens_per_second"] for test in json.loads(bench.stdout)["tests"]}
    columns = [f"{name}{n}: nibble {ours[name]:.1f}, llama.cpp {theirs[name]:.1f} tok/s ({ours[name] / theirs[name]:.2f} x)"
               for name, n in (("pp", args.prompt), ("tg", args.decode))]
    shape = f"{args.type}, {args.layers} layers x {args.experts} experts, {args.threads} threads"
    print(f"| {shape}, activations {args.activations} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
