// The command line: subcommands, flags, environment variables. Defaults stand in commands.h and sampler.h.
#include <fcntl.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <numeric>

#include "base/log.h"
#include "commands.h"
#include "ids.h"
#include "model_path.h"
#include "ops/backend.h"

namespace nibble {
namespace {

int levenshtein(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      int above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// The candidate nearest to `word`; empty where none is near.
std::string nearest(const std::string& word, const std::vector<std::string>& candidates) {
  std::string best;
  int best_distance = 1 + static_cast<int>(word.size()) / 3;
  for (const std::string& candidate : candidates) {
    int distance = levenshtein(word, candidate);
    if (distance <= best_distance && (best.empty() || distance < best_distance)) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

// "--temp" -> NIBBLE_TEMP, for every option that takes part.
void name_environment(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    if (option->get_lnames().empty() || option->get_lnames()[0] == "help") continue;
    // A prompt belongs to one call; from the environment it would fight with -f and the chat.
    if (option->get_lnames()[0] == "prompt" || option->get_lnames()[0] == "file") continue;
    std::string name = "NIBBLE_";
    for (char c : option->get_lnames()[0]) name += c == '-' ? '_' : static_cast<char>(std::toupper(c));
    option->envname(name);
  }
}

void add_model(CLI::App& command, std::string& model) {
  command
      .add_option("-m,--model", model,
                  "Model: a directory with config.json, tokenizer.json, *.safetensors, or a .gguf file; for "
                  "bench and logits also made-up weights, as synthetic:laguna-s-2.1:layers=4:experts=64")
      ->required();
}

// `chunk_flags`: names of the one for the chunks of prompts.
void add_model_options(CLI::App& command, ModelOptions& o,
                       const std::string& chunk_flags = "-b,--prefill-chunk,--batch-size") {
  add_model(command, o.model);
  command.add_option("--device", o.device, "Where to compute")
      ->check(CLI::IsMember(backend_names()))
      ->capture_default_str()
      ->group("Machine");
  command
      .add_option(
          "--cpu-isa", o.cpu_isa,
          "Instruction set of the cpu backend (amx, avx512_bf16, avx512_vnni, avx512, avx2, neon_dot, "
          "generic; default: the best here)")
      ->group("Machine");
  command
      .add_option("--tensor-cores", o.tensor_cores,
                  "Tensor cores for BF16, NVFP4, MXFP4 and q4 weights on cuda: on or off (float32 products; "
                  "default: where they can)")
      ->check(CLI::IsMember({"on", "off"}))
      ->group("Machine");
  command
      .add_option("--moe-path", o.moe_path,
                  "Routed experts on cuda: the kernels for few or many rows an expert (same bits), float32 "
                  "ones (portable), or the fastest (auto)")
      ->check(CLI::IsMember({"auto", "few", "many", "portable"}))
      ->capture_default_str()
      ->group("Machine");
  command
      .add_flag("!--no-cuda-graphs", o.cuda_graphs,
                "Launch each kernel of a step by itself (slower, same bits)")
      ->group("Machine");
  command
      .add_option("-t,--threads", o.threads,
                  "Threads (default: one for each physical core that this process may use)")
      ->check(CLI::Range(0, 1024))
      ->group("Machine");
  command
      .add_option(chunk_flags, o.prefill_chunk,
                  "Prompt tokens in a step; changes speed and memory, no bit of the result")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->group("Machine");
  command
      .add_option("--moe-arith", o.moe_arith,
                  "Arithmetic of NVFP4 experts: w4a4 rounds what goes into them to NVFP4 too")
      ->check(CLI::IsMember({"w4a16", "w4a4"}))
      ->capture_default_str()
      ->group("Arithmetic");
  command
      .add_option(
          "--cpu-activations", o.cpu_activations,
          "Activations into products on the cpu: int8 rounds them to 8 bits for 4-bit weights and, by "
          "avx512_bf16 and amx, to bfloat16 for BF16 weights (faster; its error is shown at start)")
      ->check(CLI::IsMember({"exact", "int8"}))
      ->capture_default_str()
      ->group("Arithmetic");
  command
      .add_option(
          "--act-scale", o.act_scale,
          "Second-level scale of rows in w4a4: of the row, of the file's calibration, or 1 (default: row)")
      ->check(CLI::IsMember({"row", "static", "unit"}))
      ->group("Arithmetic");
}

}  // namespace

BackendOptions backend_options(const ModelOptions& o) {
  BackendOptions options{.threads = o.threads,
                         .cpu_isa = o.cpu_isa,
                         .cpu_activations = o.cpu_activations,
                         .tensor_cores = o.tensor_cores,
                         .moe_path = o.moe_path,
                         .moe_paths_file = moe_paths_file(),
                         .cuda_graphs = o.cuda_graphs};
  if (options.tensor_cores.empty() && o.moe_arith == "w4a4") options.tensor_cores = "off";
  return options;
}

namespace {

void add_run(CLI::App& app, RunOptions& o) {
  CLI::App& run = *app.add_subcommand("run", "Generate from a prompt, or chat at the terminal (no -p)");
  add_model_options(run, o.model);
  run.add_option("-c,--ctx-size", o.model.context, "Context in tokens (default: the model's, at most 8192)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 28))
      ->group("Machine");
  run.add_option("-p,--prompt", o.prompt, "Text to go on from; with --sys a question to the assistant")
      ->group("Text");
  run.add_option("-f,--file", o.prompt_file, "The prompt is in this file")->group("Text");
  run.add_option("--sys,--system-prompt", o.system, "System message (also -sys); uses the chat template")
      ->group("Text");
  run.add_option("--chat-template", o.chat_template, "Jinja file to take instead of the model's own template")
      ->group("Text");
  run.add_option("-n,--predict", o.max_tokens,
                 "Tokens to generate at most; -1: until the model ends or the context is full")
      ->check(CLI::Range(int64_t{-1}, int64_t{1} << 28))
      ->capture_default_str()
      ->group("Text");
  run.add_option("--stop", o.stop, "End before this text; may be given several times")
      ->group("Text")
      ->allow_extra_args(false);
  run.add_flag("--ignore-eos", o.ignore_eos, "Go on after the model's end token")->group("Text");
  run.add_flag("--json", o.json, "One JSON object with text and timing instead of streamed text")
      ->group("Text");
  run.add_flag("--no-stats", o.no_stats, "No timing lines at the end")->group("Text");
  const std::string sampling = "Sampling (default: generation_config.json, then the value shown)";
  run.add_option("--temp,--temperature", o.temperature, "0 is greedy (0.8)")->group(sampling);
  run.add_option("--top-k", o.top_k, "Keep the k most likely; 0: all (40)")->group(sampling);
  run.add_option("--top-p", o.top_p, "Keep the most likely up to this mass (0.95)")->group(sampling);
  run.add_option("--min-p", o.min_p, "Drop what is less likely than this share of the best (0.05)")
      ->group(sampling);
  run.add_option("--repeat-penalty", o.repeat_penalty, "Divides the logit of a token that was seen (1 = off)")
      ->group(sampling);
  run.add_option("--presence-penalty", o.presence_penalty, "Subtracted once from what was seen (0)")
      ->group(sampling);
  run.add_option("--frequency-penalty", o.frequency_penalty, "Subtracted for each time it was seen (0)")
      ->group(sampling);
  run.add_option("--repeat-last-n", o.repeat_last_n, "How far back penalties look; -1: all (64)")
      ->group(sampling);
  run.add_option("--seed", o.seed, "Same seed, same text; -1: a new one each run")
      ->check(CLI::Range(int64_t{-1}, INT64_MAX))
      ->capture_default_str()
      ->group(sampling);
}

void add_others(CLI::App& app, InspectOptions& inspect, LogitsOptions& logits, TokenizeOptions& tokenize,
                DetokenizeOptions& detokenize, std::string& logits_ids, std::string& detokenize_ids) {
  CLI::App& i = *app.add_subcommand(
      "inspect", "Show a model's architecture, tensors and bytes, and what would not load");
  i.add_option("model,-m,--model", inspect.model, "Model directory or .gguf file")->required();
  i.add_flag("--tensors", inspect.tensors, "List every tensor");
  i.add_flag("--json", inspect.json, "As JSON");

  CLI::App& l = *app.add_subcommand("logits", "Write the logits of token ids as a .npy file");
  add_model_options(l, logits.model);
  l.add_option("--ids", logits_ids, "Token ids: 5,17,42");
  l.add_option("--ids-file", logits.ids_file, "Token ids in a file");
  l.add_option("-o,--output", logits.output, "The .npy file to write: float32 [T, V]")->required();

  CLI::App& t = *app.add_subcommand("tokenize", "Text to token ids");
  add_model(t, tokenize.model);
  t.add_option("text,-p,--prompt", tokenize.text, "The text (default: standard input)");
  t.add_flag("--no-special", tokenize.no_special, "Special tokens spelled in the text are plain text");
  t.add_flag("--json", tokenize.json, "As a JSON list");

  CLI::App& d = *app.add_subcommand("detokenize", "Token ids to text");
  add_model(d, detokenize.model);
  d.add_option("ids,--ids", detokenize_ids, "Token ids: 5,17,42 (default: standard input)");
  d.add_flag("--skip-special", detokenize.skip_special, "Leave special tokens out");
}

void add_bench(CLI::App& app, BenchOptions& o) {
  CLI::App& bench = *app.add_subcommand(
      "bench", "Tokens a second of prompts and of decoding, beside what the memory could give");
  add_model_options(bench, o.model, "--prefill-chunk");
  const CLI::Range tokens(int64_t{0}, int64_t{1} << 28);
  bench.add_option("-p,--n-prompt", o.prompt_tokens, "Tokens of the prompt; 0: none")
      ->check(tokens)
      ->capture_default_str();
  bench.add_option("-n,--n-gen", o.new_tokens, "Tokens that each sequence decodes; 0: none")
      ->check(tokens)
      ->capture_default_str();
  bench.add_option("-b,--batch", o.batches, "Sequences that decode at once: 1,8,32")->capture_default_str();
  bench.add_option("-r,--repetitions", o.repetitions, "Of each test, behind a warm-up; the median counts")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}))
      ->capture_default_str();
  bench.add_flag("--json", o.json, "As JSON, with every repetition");
}

// How a command writes a model.
void add_writing(CLI::App& command, int& threads, uint64_t& max_shard_bytes) {
  command.add_option("-t,--threads", threads, "Threads (default: all CPUs that this process may use)")
      ->check(CLI::Range(0, 1024));
  command
      .add_option("--max-shard-size", max_shard_bytes,
                  "Largest file of weights, in bytes or as 5GB, 512MB (a tensor is never split)")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 62))
      ->default_str("5GB");
}

void add_quantize(CLI::App& app, QuantizeCommandOptions& o) {
  CLI::App& quantize = *app.add_subcommand("quantize", "Make a 4-bit model of a BF16, F16 or F32 one");
  quantize.add_option("source", o.source, "Model directory: config.json, *.safetensors")->required();
  quantize.add_option("destination", o.destination, "Directory to make; goes on where a killed run ended")
      ->required();
  quantize.add_option("--type", o.type, "Format of the quantized weights")
      ->check(CLI::IsMember({"nvfp4", "mxfp4", "q4"}))
      ->required();
  quantize
      .add_option("--what", o.what,
                  "Routed experts, or the linear layers of attention, dense and shared feed-forward too")
      ->check(CLI::IsMember({"experts", "all-linear"}))
      ->capture_default_str();
  add_writing(quantize, o.threads, o.max_shard_bytes);
}

void add_convert(CLI::App& app, ConvertCommandOptions& o) {
  CLI::App& convert = *app.add_subcommand(
      "convert", "Make a directory in ModelOpt's layout of a GGUF file or a compressed-tensors directory");
  convert.add_option("source", o.source, "Model: a .gguf file, or a directory")->required();
  convert.add_option("destination", o.destination, "Directory to make; goes on where a killed run ended")
      ->required();
  convert
      .add_option("--type", o.type,
                  "Format of the linear layers whose blocks have no equivalent (default: they become BF16)")
      ->check(CLI::IsMember({"nvfp4"}));
  add_writing(convert, o.threads, o.max_shard_bytes);
}

void add_doctor(CLI::App& app, DoctorOptions& o) {
  CLI::App& doctor = *app.add_subcommand("doctor", "Show what there is to compute with here, and test it");
  doctor.add_option("--device", o.device, "This one alone; an error where it is missing (default: all)")
      ->check(CLI::IsMember(backend_names()));
}

// One line on stderr that names what was wrong with the command line.
int report(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& arguments) {
  if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
  std::vector<std::string> names;
  const CLI::App* command = &app;
  for (const CLI::App* sub : app.get_subcommands()) command = sub;
  for (const CLI::Option* option : command->get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  std::string message = error.what();
  std::string word;  // the argument that nothing is called
  if (command == &app) {
    for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
      names.push_back(sub->get_name());
    }
    if (!arguments.empty()) word = arguments[0];
  } else {
    // Looked at whatever CLI11 complains about first: a misspelt flag is why another one is "missing".
    const std::vector<std::string> extras = command->remaining(true);
    for (const std::string& argument : arguments) {
      if (word.empty() && std::find(extras.begin(), extras.end(), argument) != extras.end()) word = argument;
    }
  }
  if (!word.empty()) {
    const std::string hint = nearest(word.substr(0, word.find('=')), names);
    message =
        fmt::format("unknown argument '{}'{}", word, hint.empty() ? "" : "; did you mean '" + hint + "'?");
  }
  std::replace(message.begin(), message.end(), '\n', ' ');
  log_error("{} (nibble {}--help shows what there is)", message,
            command == &app ? "" : command->get_name() + " ");
  return static_cast<int>(ErrorCode::kUser);
}

int run_main(int argc, char** argv) {
  CLI::App app("nibble: inference of 4-bit mixture-of-experts language models", "nibble");
  app.set_version_flag("--version", "nibble " NIBBLE_VERSION);
  app.require_subcommand(1);
  bool verbose = false;
  std::string log_file;

  RunOptions run;
  InspectOptions inspect;
  LogitsOptions logits;
  BenchOptions bench;
  TokenizeOptions tokenize;
  DetokenizeOptions detokenize;
  std::string logits_ids, detokenize_ids;
  QuantizeCommandOptions quantize;
  ConvertCommandOptions convert;
  DoctorOptions doctor;
  add_run(app, run);
  add_others(app, inspect, logits, tokenize, detokenize, logits_ids, detokenize_ids);
  add_bench(app, bench);
  add_quantize(app, quantize);
  add_convert(app, convert);
  add_doctor(app, doctor);
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    command->add_flag("-v,--verbose", verbose, "More lines about what happens")->group("Messages");
    command->add_option("--log-file", log_file, "Append all messages to this file too")->group("Messages");
    name_environment(*command);
  }

  // "-sys" is what fingers know; CLI11 has one-letter short flags only.
  std::vector<std::string> arguments(argv + 1, argv + argc);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_value = i > 0 && (arguments[i - 1] == "-p" || arguments[i - 1] == "--prompt");
    if (arguments[i] == "-sys" && !is_value) arguments[i] = "--sys";
  }
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    return report(app, error, arguments);
  }
  if (verbose) set_log_level(LogLevel::kDebug);

  auto execute = [&]() -> Status {
    if (!log_file.empty()) NIBBLE_RETURN_IF_ERROR(set_log_file(log_file));
    if (app.got_subcommand("run")) return run_command(run);
    if (app.got_subcommand("inspect")) return inspect_command(inspect);
    if (app.got_subcommand("bench")) return bench_command(bench);
    if (app.got_subcommand("quantize")) return quantize_command(quantize);
    if (app.got_subcommand("convert")) return convert_command(convert);
    if (app.got_subcommand("doctor")) return doctor_command(doctor);
    if (app.got_subcommand("tokenize")) return tokenize_command(tokenize);
    if (app.got_subcommand("logits")) {
      NIBBLE_ASSIGN_OR_RETURN(logits.ids, parse_ids(logits_ids, "--ids"));
      return logits_command(logits);
    }
    NIBBLE_ASSIGN_OR_RETURN(detokenize.ids, parse_ids(detokenize_ids, "ids"));
    return detokenize_command(detokenize);
  };
  Status status = execute();
  if (status.ok() && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0))
    status = user_error("standard output: writing failed: {}", std::strerror(errno));
  if (!status.ok()) log_error("{}", status.message());
  return static_cast<int>(status.code());
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) {
  // A closed standard stream's number would go to the next file opened: a model, to be read as a
  // conversation.
  for (int stream = 0; stream < 3; ++stream) {
    if (::fcntl(stream, F_GETFD) == -1) (void)::open("/dev/null", stream == 0 ? O_RDONLY : O_WRONLY);
  }
  try {
    return nibble::run_main(argc, argv);
  } catch (const std::bad_alloc&) {
    nibble::log_error("no memory left");
  } catch (const std::exception& error) {
    nibble::log_error("{}", error.what());
  }
  return static_cast<int>(nibble::ErrorCode::kInternal);
}
