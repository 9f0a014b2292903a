// The subcommands of nibble: what each is asked (filled in by nibble.cc from flags and environment) and the
// function that does it. A function returns what went wrong, if anything; nibble.cc turns that into the exit
// code: 0 ok, 1 user error, 2 internal.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "engine/scheduler.h"
#include "ops/backend.h"

namespace nibble {

struct ModelOptions {
  std::string model;                      // -m
  std::string device = "cpu";             // --device
  std::string cpu_isa;                    // --cpu-isa; empty: the best that the machine has
  std::string cpu_activations = "exact";  // --cpu-activations: exact, int8
  std::string tensor_cores;               // --tensor-cores: on, off; empty: where they can
  std::string moe_path = "auto";          // --moe-path: auto, few, many, portable
  bool cuda_graphs = true;                // --no-cuda-graphs
  int threads = 0;                        // -t; 0: one for each physical core that this process may use
  int64_t context = 0;                    // -c; 0: the model's own, at most EngineOptions::kDefaultContext
  int64_t prefill_chunk = kDefaultPrefillChunk;  // --prefill-chunk
  std::string moe_arith = "w4a16";               // --moe-arith: w4a16, w4a4
  std::string act_scale;                         // --act-scale: row, static, unit; empty: row
};

BackendOptions backend_options(const ModelOptions& options);

struct RunOptions {
  ModelOptions model;
  std::optional<std::string> prompt;  // -p; without it: a chat at the terminal
  std::string prompt_file;            // -f
  std::string system;                 // -sys
  std::string chat_template;          // --chat-template
  int64_t max_tokens = -1;            // -n; -1: until the model ends or the context is full
  // What is not given comes from the model's generation_config.json, then from the built-in defaults.
  std::optional<float> temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
  std::optional<int32_t> top_k, repeat_last_n;
  int64_t seed = -1;              // -1: a new one each run, shown with -v
  std::vector<std::string> stop;  // --stop
  bool ignore_eos = false;
  bool no_stats = false;  // no timing lines at the end
  bool json = false;      // one JSON object instead of streamed text
};
Status run_command(const RunOptions& options);

struct InspectOptions {
  std::string model;
  bool tensors = false;  // list every tensor
  bool json = false;
};
Status inspect_command(const InspectOptions& options);

struct LogitsOptions {
  ModelOptions model;
  std::vector<int32_t> ids;  // --ids
  std::string ids_file;      // --ids-file: integers between spaces, commas or lines
  std::string output;        // -o: float32 [T, V] in numpy's .npy format
};
Status logits_command(const LogitsOptions& options);

struct BenchOptions {
  ModelOptions model;
  int64_t prompt_tokens = 512;  // -p; 0: no prompt
  int64_t new_tokens = 128;     // -n; 0: no decoding
  std::string batches = "1";    // -b: 1,8,32
  int64_t repetitions = 5;      // -r
  bool json = false;
};
Status bench_command(const BenchOptions& options);

struct TokenizeOptions {
  std::string model;
  std::optional<std::string> text;  // absent: standard input
  bool json = false;
  bool no_special = false;  // special tokens spelled in the text are text
};
Status tokenize_command(const TokenizeOptions& options);

struct DetokenizeOptions {
  std::string model;
  std::vector<int32_t> ids;  // none: standard input
  bool skip_special = false;
};
Status detokenize_command(const DetokenizeOptions& options);

struct QuantizeCommandOptions {
  std::string source, destination;
  std::string type;                          // --type: nvfp4, mxfp4, q4
  std::string what = "experts";              // --what: experts, all-linear
  int threads = 0;                           // -t; 0: as many as this process may use
  uint64_t max_shard_bytes = 5'000'000'000;  // --max-shard-size
};
Status quantize_command(const QuantizeCommandOptions& options);

struct ConvertCommandOptions {
  std::string source, destination;
  std::string type;                          // --type: nvfp4; empty: blocks without an equivalent become BF16
  int threads = 0;                           // -t; 0: as many as this process may use
  uint64_t max_shard_bytes = 5'000'000'000;  // --max-shard-size
};
Status convert_command(const ConvertCommandOptions& options);

struct DoctorOptions {
  std::string device;  // --device; empty: all
};
Status doctor_command(const DoctorOptions& options);

}  // namespace nibble
