#include "engine/throughput.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <span>

#include "base/numbers.h"

namespace nibble {
namespace {

// Runs a workload, or the beginning of it.
class Runner {
 public:
  Runner(Decoder& decoder, const Workload& workload, const StepProgress& progress)
      : decoder_(decoder), workload_(workload), progress_(progress) {
    std::mt19937 random(1);
    std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(decoder.spec().vocab - 1));
    ids_S_.resize(static_cast<size_t>(workload.sequences));
    for (std::vector<int32_t>& ids : ids_S_) {
      for (int64_t t = 0; t < workload.tokens; ++t) ids.push_back(id(random));
    }
  }

  // The chunks that each sequence is fed in.
  std::vector<int64_t> chunks() const {
    std::vector<int64_t> all;
    for (int64_t at = 0; at < workload_.tokens; at += workload_.chunk) {
      all.push_back(std::min(workload_.chunk, workload_.tokens - at));
    }
    return all;
  }

  // How many steps all calls of run() will have made together.
  void expect(int64_t steps) { expected_ = steps; }

  // Seconds of all steps together. `after_step(rows, logits)` is called behind each and counts as its time.
  template <class AfterStep>
  Result<double> run(std::span<const int64_t> chunks, const Trace* trace, AfterStep after_step) {
    std::vector<SequenceStep> steps(ids_S_.size());
    for (SequenceStep& step : steps) {
      NIBBLE_ASSIGN_OR_RETURN(step.slot, decoder_.kv().add_sequence());
    }
    const auto start = std::chrono::steady_clock::now();
    size_t at = 0;
    for (size_t c = 0; c < chunks.size(); ++c) {
      const auto count = static_cast<size_t>(chunks[c]);
      const bool logits = workload_.decodes || c + 1 == chunks.size();
      for (size_t s = 0; s < steps.size(); ++s) {
        steps[s].ids = std::span(ids_S_[s]).subspan(at, count);
        steps[s].logits = logits ? WantLogits::kLast : WantLogits::kNone;
      }
      // As the engine does by default.
      NIBBLE_RETURN_IF_ERROR(decoder_.forward_top(steps, trace).status());
      if (progress_) progress_(++done_, expected_);
      after_step(workload_.sequences * chunks[c], logits);
      at += count;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (const SequenceStep& step : steps) decoder_.kv().remove_sequence(step.slot);
    return seconds.count();
  }

 private:
  Decoder& decoder_;
  const Workload& workload_;
  const StepProgress& progress_;
  int64_t done_ = 0, expected_ = 0;
  std::vector<std::vector<int32_t>> ids_S_;
};

// The expert ids of a trace, without repetition.
int64_t distinct(Memory& memory, Rows<const int32_t> ids) {
  if (ids.rows == 0) return 0;
  std::vector<int32_t> host(static_cast<size_t>((ids.rows - 1) * ids.stride + ids.cols));
  memory.download(host.data(), ids.data, static_cast<int64_t>(host.size() * sizeof(int32_t)));
  std::set<int32_t> seen;
  for (int64_t t = 0; t < ids.rows; ++t) {
    const int32_t* row = host.data() + t * ids.stride;
    seen.insert(row, row + ids.cols);
  }
  return std::ssize(seen);
}

// Fills in what a repetition reads.
Status count_weights(Decoder& decoder, Runner& runner, Throughput& result) {
  std::vector<int64_t> experts(decoder.spec().layers.size());
  const Trace trace{.hidden = {}, .experts = [&](size_t layer, Rows<const int32_t> ids) {
                      experts[layer] = distinct(decoder.ops().memory(), ids);
                    }};
  const auto layers = std::ranges::count_if(decoder.spec().layers,
                                            [](const LayerSpec& layer) { return layer.moe.has_value(); });
  int64_t chosen = 0;
  auto add_step = [&](int64_t rows, bool logits) {
    result.weight_bytes += weight_bytes_of_step(decoder.spec(), decoder.weights(), rows, experts, logits);
    for (int64_t e : experts) chosen += e;
  };
  NIBBLE_RETURN_IF_ERROR(runner.run(runner.chunks(), &trace, add_step).status());
  if (layers > 0) {
    result.experts_a_layer =
        static_cast<double>(chosen) / static_cast<double>(layers * result.workload.steps());
  }
  return {};
}

}  // namespace

DecoderOptions options_for(const std::vector<Workload>& workloads) {
  DecoderOptions options;
  options.kv = {.max_sequences = 1, .max_tokens = 1, .pool_tokens = 1, .max_new_tokens = 1};
  options.max_rows = 1;
  auto at_least = [](int64_t& value, int64_t wanted) { value = std::max(value, wanted); };
  for (const Workload& w : workloads) {
    at_least(options.kv.max_sequences, w.sequences);
    at_least(options.kv.max_tokens, w.tokens);
    at_least(options.kv.pool_tokens, w.sequences * round_up(w.tokens, options.kv.page_tokens));
    at_least(options.kv.max_new_tokens, std::min(w.chunk, w.tokens));
    at_least(options.max_rows, w.sequences * std::min(w.chunk, w.tokens));
    at_least(options.max_logit_rows, w.sequences);
  }
  return options;
}

Result<Throughput> measure(Decoder& decoder, const Workload& workload, int64_t repetitions,
                           const StepProgress& progress) {
  NIBBLE_CHECK(repetitions >= 1 && workload.tokens >= 1);
  Throughput result{.workload = workload, .seconds = {}};
  Runner runner(decoder, workload, progress);
  const std::vector<int64_t> chunks = runner.chunks();
  // A backend that records steps does so when a shape comes again (Ops::repeat), and a traced one does not
  // count: the shapes are those of the first and the last step.
  constexpr int kWarmUps = 3;
  const std::vector<int64_t> shapes =
      chunks.size() > 1 ? std::vector{chunks.front(), chunks.back()} : std::vector{chunks.front()};
  runner.expect((1 + repetitions) * std::ssize(chunks) + kWarmUps * std::ssize(shapes));
  NIBBLE_RETURN_IF_ERROR(count_weights(decoder, runner, result));
  auto nothing = [](int64_t /*rows*/, bool /*logits*/) {};
  for (int i = 0; i < kWarmUps; ++i) NIBBLE_RETURN_IF_ERROR(runner.run(shapes, nullptr, nothing).status());
  for (int64_t i = 0; i < repetitions; ++i) {
    NIBBLE_ASSIGN_OR_RETURN(const double seconds, runner.run(chunks, nullptr, nothing));
    result.seconds.push_back(seconds);
  }
  std::sort(result.seconds.begin(), result.seconds.end());
  return result;
}

}  // namespace nibble
