// nibble bench: tokens a second of prompts and of decoding, beside what the memory could give.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "arithmetic.h"
#include "commands.h"
#include "engine/model_source.h"
#include "engine/throughput.h"
#include "model/loaded_model.h"
#include "model_path.h"
#include "ops/backend.h"
#include "ops/self_test.h"
#include "progress.h"

namespace nibble {
namespace {

struct Report {
  std::string model, device, arithmetic;
  int64_t weight_bytes = 0;  // of the whole model
  double read_ceiling = 0;   // bytes a second
  std::vector<RoundingError> rounding;
  std::vector<Throughput> results;

  double share_of_ceiling(const Throughput& t) const { return t.weight_bytes_per_second() / read_ceiling; }
};

Result<std::vector<int64_t>> batches_of(const std::string& text) {
  constexpr int64_t kMost = 1024;
  std::vector<int64_t> batches;
  for (size_t at = 0; at <= text.size();) {
    const std::string word = text.substr(at, text.find(',', at) - at);
    int64_t batch = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), batch);
    if (error != std::errc() || end != word.data() + word.size() || batch < 1 || batch > kMost) {
      return user_error("--batch: wanted numbers of 1 to {} such as 1,8,32, found '{}' in '{}'", kMost,
                        word.substr(0, 40), text.substr(0, 80));
    }
    batches.push_back(batch);
    at += word.size() + 1;
  }
  return batches;
}

Result<std::vector<Workload>> workloads_of(const BenchOptions& options) {
  std::vector<Workload> workloads;
  if (options.prompt_tokens > 0) {
    workloads.push_back({.name = fmt::format("pp{}", options.prompt_tokens),
                         .tokens = options.prompt_tokens,
                         .chunk = options.model.prefill_chunk});
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int64_t> batches, batches_of(options.batches));
  for (int64_t batch : batches) {
    if (options.new_tokens == 0) break;
    workloads.push_back({.name = fmt::format("tg{}", options.new_tokens),
                         .sequences = batch,
                         .tokens = options.new_tokens,
                         .decodes = true});
  }
  if (workloads.empty()) return user_error("-p 0 and -n 0 leave nothing to measure");
  return workloads;
}

void print_table(const Report& report, const BenchOptions& options) {
  fmt::print(
      "| model | device | test | batch | tok/s | lowest - highest | ms/step | GB/token | GB/s | of ceiling "
      "|\n"
      "|---|---|---|---:|---:|---:|---:|---:|---:|---:|\n");
  for (const Throughput& t : report.results) {
    fmt::print("| {} | {} | {} | {} | {:.2f} | {:.2f} - {:.2f} | {:.3f} | {:.4f} | {:.2f} | {:.1f}% |\n",
               report.model, options.model.device, t.workload.name, t.workload.sequences,
               t.tokens() / t.median_seconds(), t.tokens() / t.seconds.back(), t.tokens() / t.seconds.front(),
               t.median_seconds() / static_cast<double>(t.workload.steps()) * 1e3,
               t.weight_bytes_per_token() / 1e9, t.weight_bytes_per_second() / 1e9,
               report.share_of_ceiling(t) * 100);
  }
  fmt::print(
      "\n{}; experts in {}; {:.2f} GB of weights, read ceiling {:.2f} GB/s (measured in this run).\n"
      "Median of {} repetitions from an empty context; random token ids; of sampling, the search for the 64 "
      "largest\n"
      "logits is included. GB are those of weights as the files have them (BF16 may be read in 12 bits), and "
      "of\n"
      "routed experts those that were chosen.\n",
      report.device, report.arithmetic, static_cast<double>(report.weight_bytes) / 1e9,
      report.read_ceiling / 1e9, options.repetitions);
  if (options.model.cpu_activations != "exact") {
    fmt::print("Activations: {}; random products are off by {}.\n", options.model.cpu_activations,
               describe(report.rounding));
  }
}

void print_json(const Report& report, const BenchOptions& options) {
  nlohmann::ordered_json json = {{"model", report.model},
                                 {"device", options.model.device},
                                 {"description", report.device},
                                 {"moe_arith", report.arithmetic},
                                 {"cpu_activations", options.model.cpu_activations},
                                 {"rounding_errors", nlohmann::ordered_json::array()},
                                 {"weight_bytes", report.weight_bytes},
                                 {"read_ceiling_bytes_per_second", report.read_ceiling},
                                 {"repetitions", options.repetitions},
                                 {"prefill_chunk", options.model.prefill_chunk},
                                 {"tests", nlohmann::ordered_json::array()}};
  for (const RoundingError& e : report.rounding) {
    json["rounding_errors"].push_back(
        {{"format", matrix_format_name(e.format)}, {"rms", e.rms}, {"worst", e.worst}});
  }
  for (const Throughput& t : report.results) {
    const double tokens = t.tokens(), steps = static_cast<double>(t.workload.steps());
    json["tests"].push_back({{"test", t.workload.name},
                             {"batch", t.workload.sequences},
                             {"tokens", t.workload.sequences * t.workload.tokens},
                             {"steps", t.workload.steps()},
                             {"seconds", t.seconds},
                             {"tokens_per_second", tokens / t.median_seconds()},
                             {"lowest_tokens_per_second", tokens / t.seconds.back()},
                             {"highest_tokens_per_second", tokens / t.seconds.front()},
                             {"ms_per_step", t.median_seconds() / steps * 1e3},
                             {"experts_per_layer_and_step", t.experts_a_layer},
                             {"weight_bytes_per_token", t.weight_bytes_per_token()},
                             {"weight_bytes_per_second", t.weight_bytes_per_second()},
                             {"share_of_read_ceiling", report.share_of_ceiling(t)}});
  }
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

Status bench_command(const BenchOptions& options) {
  const ModelOptions& m = options.model;
  NIBBLE_ASSIGN_OR_RETURN(const ExpertArithmetic arithmetic, arithmetic_of(m));
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<Workload> workloads, workloads_of(options));
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, find_model(m.model));
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source,
                          ModelSource::open(FileSystem::posix(), path));
  NIBBLE_ASSIGN_OR_RETURN(ModelSpec spec, source->spec());
  for (const Workload& w : workloads) {
    if (w.tokens > spec.max_positions) {
      return user_error("{}: the model was made for {} positions", w.name, spec.max_positions);
    }
  }
  DecoderOptions decoder_options = options_for(workloads);
  decoder_options.arithmetic = arithmetic;

  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<Ops> ops, make_backend(m.device, backend_options(m)));
  NIBBLE_RETURN_IF_ERROR(self_test(*ops));
  Report report{.model = m.model, .device = ops->description(), .arithmetic = describe(arithmetic)};
  // Before the model needs the memory.
  NIBBLE_ASSIGN_OR_RETURN(report.read_ceiling, ops->read_bandwidth());
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<WeightSource> weights, source->weights(spec, formats_copied(*ops)));
  report.weight_bytes = weights->total_bytes();
  ProgressLine progress("loading " + m.model);
  auto loaded = load_model(std::move(weights), std::move(spec), std::move(ops), decoder_options,
                           [&](int64_t done, int64_t total) { progress.update(done, total); });
  progress.clear();
  NIBBLE_ASSIGN_OR_RETURN(const LoadedModel model, std::move(loaded));
  report.rounding = model.rounding;
  progress.finish(report.weight_bytes);
  for (const Workload& workload : workloads) {
    ProgressLine steps(fmt::format("{}, batch {}", workload.name, workload.sequences));
    auto measured = measure(*model.decoder, workload, options.repetitions,
                            [&](int64_t done, int64_t total) { steps.update_steps(done, total); });
    steps.clear();
    NIBBLE_ASSIGN_OR_RETURN(Throughput result, std::move(measured));
    report.results.push_back(std::move(result));
  }
  if (options.json) {
    print_json(report, options);
  } else {
    print_table(report, options);
  }
  return {};
}

}  // namespace nibble
