// The forward pass against tests/golden: what an independent float32 implementation computed from the same
// checkpoints. Bars: docs/numerics.md.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string_view>

#include "golden_file.h"
#include "gpu.h"
#include "model/test_model.h"
#include "ops/cpu/isa.h"

namespace nibble {
namespace {

struct Case {
  const char* model;
  const char* backend;
  std::string variant;  // of cpu the instruction set, of cuda whether it takes tensor cores
  // The reference of `laguna` ran on a model that had been cast to bfloat16 and back, its RoPE frequencies
  // included (docs/numerics.md); the NVFP4 references did not.
  bool bf16_rope = false;
  ExpertArithmetic arithmetic = {};
  std::string cpu_activations = "exact";

  BackendOptions backend_options() const {
    BackendOptions options{.cpu_activations = cpu_activations};
    (std::string_view(backend) == "cpu" ? options.cpu_isa : options.tensor_cores) = variant;
    return options;
  }
  // Products with activations as sums of two bfloat16 numbers: nearly float32.
  bool tensor_cores() const { return std::string_view(backend) == "cuda" && variant.empty(); }
  // What an error of the arithmetic stays below; the bar of the specification is 2e-3. On tensor cores the
  // largest seen is 1e-4.
  double float32_bar() const { return tensor_cores() ? 3e-4 : 2e-5; }

  // laguna-ct holds the weights of laguna-nvfp4, and does what that does.
  std::string reference() const {
    if (!arithmetic.w4a4) return golden_directory(model) + "/golden.safetensors";
    return golden_directory(std::string(model) == "laguna-ct" ? "laguna-nvfp4" : model) +
           "/golden-w4a4.safetensors";
  }
  TestModel load(int64_t rows, int64_t sequences = 1) const {
    return load_test_model(golden_directory(model), backend, options_for(rows, sequences, 1024, arithmetic),
                           backend_options(), bf16_rope);
  }
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.model << (c.arithmetic.w4a4 ? " W4A4" : "") << " on " << c.backend << " " << c.variant;
}

class Golden : public testing::TestWithParam<Case> {
 protected:
  void expect_that_chunks_and_batches_change_no_bit();

  TestModel model_ = GetParam().load(70);
  GoldenFile golden_{GetParam().reference()};
};

// The largest |mine - wanted| over the rows that `wanted` has, relative to the largest |wanted| of its row.
double worst_relative_error(Rows<const float> mine, std::span<const float> wanted,
                            const std::vector<int32_t>& rows) {
  const auto cols = static_cast<size_t>(mine.cols);
  EXPECT_FALSE(rows.empty());
  EXPECT_EQ(wanted.size(), rows.size() * cols);
  EXPECT_EQ(rows.back(), mine.rows - 1);
  double worst = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    const float* a = mine.row(rows[r]);
    const float* b = wanted.data() + r * cols;
    double largest = 0, error = 0;
    for (size_t i = 0; i < cols; ++i) {
      largest = std::max(largest, std::fabs(static_cast<double>(b[i])));
      error = std::max(error, std::fabs(static_cast<double>(a[i]) - b[i]));
      if (std::isnan(a[i])) return INFINITY;
    }
    worst = std::max(worst, error / largest);
  }
  return worst;
}

// W4A4 rounds activations, and where one stands at a tie between two codes, the last bit of what came before
// decides. One does, in all references: olmoe's layer 2, token 1, column 109 into gate and up of prompt 1,
// whose quotient is 1.25000006 on one backend and 1.24999991 on another (docs/numerics.md); the logits show
// it by 2e-3 in the rows that the archive keeps, by 3.4e-2 in the worst of all.
bool stands_at_a_tie(const Case& c, int prompt) {
  return c.arithmetic.w4a4 && std::string(c.model) == "olmoe-nvfp4" && prompt == 1;
}

// A dense view of the backend's memory.
template <class T>
std::vector<T> on_host(const TestModel& model, Rows<const T> view) {
  EXPECT_EQ(view.stride, view.cols);
  std::vector<T> data(static_cast<size_t>(view.rows * view.cols));
  model.ops->memory().download(data.data(), view.data, static_cast<int64_t>(data.size() * sizeof(T)));
  return data;
}

TEST_P(Golden, Logits) {
  const int prompts = GetParam().arithmetic.w4a4 ? 2 : 3;
  for (int i = 0; i < prompts; ++i) {
    std::string n = std::to_string(i);
    auto ids = golden_.get<int32_t>("prompt." + n);
    const std::vector<float> logits = model_.logits(ids, ids.size());
    double error =
        worst_relative_error({logits.data(), std::ssize(ids), model_.spec().vocab},
                             golden_.get<float>("logits." + n), golden_.rows("logits." + n, ids.size()));
    RecordProperty("relative_error_" + n, fmt::format("{:.2e}", error));
    // The bar of the specification is 2e-3; this is what float32 gives: an error of the arithmetic, not of
    // the model, shows long before the bar.
    EXPECT_LT(error, stands_at_a_tie(GetParam(), i) ? 5e-3 : GetParam().float32_bar()) << "prompt " << i;
  }
}

TEST_P(Golden, HiddenStatesAndExpertsOfEveryLayer) {
  auto ids = golden_.get<int32_t>("prompt.0");
  const bool has_hidden = !GetParam().arithmetic.w4a4;
  const std::vector<float> hidden = has_hidden ? golden_.get<float>("hidden.0") : std::vector<float>();
  const std::vector<int32_t> rows = golden_.rows("hidden.0", ids.size());
  const size_t tokens = ids.size(),
               layer_size = rows.size() * static_cast<size_t>(model_.spec().residual_width());
  if (has_hidden) {
    ASSERT_EQ(hidden.size(), (model_.spec().layers.size() + 1) * layer_size);
  }
  std::set<size_t> layers_seen, routers_seen;
  Trace trace;
  trace.hidden = [&](size_t layer, Rows<const float> view) {
    layers_seen.insert(layer);
    if (!has_hidden) return;
    const std::vector<float> data = on_host(model_, view);
    const Rows<const float> x(data.data(), view.rows, view.cols);
    const std::span<const float> wanted = std::span(hidden).subspan(layer * layer_size, layer_size);
    EXPECT_LT(worst_relative_error(x, wanted, rows), GetParam().float32_bar()) << "after layer " << layer;
  };
  trace.experts = [&](size_t layer, Rows<const int32_t> view) {
    routers_seen.insert(layer);
    const std::vector<int32_t> data = on_host(model_, view);
    const Rows<const int32_t> chosen(data.data(), view.rows, view.cols);
    auto wanted = golden_.get<int32_t>("router.0." + std::to_string(layer));
    for (size_t t = 0; t < tokens; ++t) {
      std::set<int32_t> mine(chosen.row(static_cast<int64_t>(t)),
                             chosen.row(static_cast<int64_t>(t)) + chosen.cols);
      std::set<int32_t> golden(wanted.begin() + static_cast<int64_t>(t) * chosen.cols,
                               wanted.begin() + static_cast<int64_t>(t + 1) * chosen.cols);
      EXPECT_EQ(mine, golden) << "layer " << layer << ", token " << t;
    }
  };
  SequenceStep step{model_.add_sequence(), ids, WantLogits::kNone};
  ASSERT_TRUE(model_.decoder->forward(std::span(&step, 1), &trace).ok());
  EXPECT_EQ(layers_seen.size(), model_.spec().layers.size() + 1);
  for (size_t i = 0; i < model_.spec().layers.size(); ++i) {
    EXPECT_EQ(routers_seen.count(i) != 0, golden_.has("router.0." + std::to_string(i))) << "layer " << i;
  }
}

TEST_P(Golden, GreedyContinuation) {
  const int prompts = GetParam().arithmetic.w4a4 ? 2 : 3;
  for (int i = 0; i < prompts; ++i) {
    std::string n = std::to_string(i);
    auto ids = golden_.get<int32_t>("prompt." + n);
    auto greedy = golden_.get<int32_t>("greedy." + n);
    auto margin = golden_.get<float>("margin." + n);
    int32_t slot = model_.add_sequence();
    std::vector<int32_t> next = ids;
    int compared = 0;
    for (size_t j = 0; j < greedy.size(); ++j) {
      SequenceStep step{slot, next, WantLogits::kLast};
      auto logits = model_.decoder->forward(std::span(&step, 1));
      ASSERT_TRUE(logits.ok()) << logits.status().message();
      auto best =
          static_cast<int32_t>(std::max_element(logits->data, logits->data + logits->cols) - logits->data);
      // The logits' error is under 1e-4 (see Logits), so these margins decide.
      if (margin[j] > 1e-3f) {
        EXPECT_EQ(best, greedy[j]) << "prompt " << i << ", step " << j;
        ++compared;
      }
      next = {greedy[j]};
    }
    EXPECT_GE(compared, std::ssize(greedy) - 2) << "prompt " << i;
    model_.decoder->kv().remove_sequence(slot);
  }
}

void Golden::expect_that_chunks_and_batches_change_no_bit() {
  auto ids = golden_.get<int32_t>("prompt.0");
  const std::vector<float> whole = model_.logits(ids, ids.size());
  for (size_t chunk : {1, 3, 23, 24, 25, 69}) {
    EXPECT_EQ(model_.logits(ids, chunk), whole) << "chunks of " << chunk;
  }
  // Eight sequences of other lengths and starts, in one step each time, against each alone.
  TestModel batch = GetParam().load(70, 8);
  std::vector<std::vector<int32_t>> prompts;
  std::vector<std::vector<float>> alone, together(8);
  for (size_t s = 0; s < 8; ++s) {
    prompts.emplace_back(ids.begin() + static_cast<int64_t>(s * 5),
                         ids.begin() + static_cast<int64_t>(s * 5 + 10 + s * 3));
    alone.push_back(model_.logits(prompts[s], prompts[s].size()));
  }
  std::vector<int32_t> slots;
  for (size_t s = 0; s < 8; ++s) slots.push_back(batch.add_sequence());
  std::vector<size_t> at(8, 0);
  for (size_t round = 0; true; ++round) {
    std::vector<SequenceStep> steps;
    std::vector<size_t> who;
    for (size_t s = 0; s < 8; ++s) {
      if (round < s || at[s] == prompts[s].size()) continue;  // staggered starts
      size_t count = std::min(1 + (round + s) % 4, prompts[s].size() - at[s]);
      steps.push_back({slots[s], std::span(prompts[s]).subspan(at[s], count), WantLogits::kAll});
      who.push_back(s);
      at[s] += count;
    }
    if (steps.empty() && round > 8) break;
    if (steps.empty()) continue;
    auto rows = batch.decoder->forward(steps);
    ASSERT_TRUE(rows.ok()) << rows.status().message();
    int64_t row = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      int64_t count = static_cast<int64_t>(steps[i].ids.size());
      together[who[i]].insert(together[who[i]].end(), rows->row(row), rows->row(row) + count * rows->cols);
      row += count;
    }
    batch.decoder->kv().check_integrity();
  }
  for (size_t s = 0; s < 8; ++s) EXPECT_EQ(together[s], alone[s]) << "sequence " << s;
}

TEST_P(Golden, ChunksAndBatchesChangeNoBit) { expect_that_chunks_and_batches_change_no_bit(); }

// What a sequence remembers (pages, rings, recurrent states) can be copied, saved and restored bit for bit.
TEST_P(Golden, CopiedAndSavedSequencesGoOnWithTheSameBits) {
  auto ids = golden_.get<int32_t>("prompt.0");
  TestModel model = GetParam().load(40, 3);
  KvCache& kv = model.decoder->kv();
  auto feed = [&](int32_t slot, size_t from, size_t count) {
    SequenceStep step{slot, std::span(ids).subspan(from, count), WantLogits::kAll};
    auto logits = model.decoder->forward(std::span(&step, 1));
    EXPECT_TRUE(logits.ok()) << logits.status().message();
    return std::vector<float>(logits->data, logits->data + logits->rows * logits->cols);
  };
  const int32_t first = model.add_sequence(), copy = model.add_sequence();
  feed(first, 0, 37);
  const std::vector<std::byte> saved = kv.save(first);
  ASSERT_TRUE(kv.copy_sequence(first, copy).ok());
  kv.check_integrity();
  const std::vector<float> wanted = feed(first, 37, 33);
  EXPECT_EQ(feed(copy, 37, 33), wanted);
  kv.remove_sequence(first);
  const int32_t restored = model.add_sequence();
  ASSERT_TRUE(kv.restore(restored, saved).ok());
  EXPECT_EQ(kv.length(restored), 37);
  EXPECT_EQ(feed(restored, 37, 33), wanted);
  // Other bytes are refused and leave an empty sequence.
  kv.remove_sequence(copy);
  const int32_t empty = model.add_sequence();
  EXPECT_FALSE(kv.restore(empty, std::span(saved).first(saved.size() - 1)).ok());
  EXPECT_FALSE(kv.restore(empty, std::span(saved).first(4)).ok());
  EXPECT_EQ(kv.length(empty), 0);
  kv.check_integrity();
}

// On the cpu with activations in 8 bits.
class GoldenInt8 : public Golden {};

TEST_P(GoldenInt8, ChunksAndBatchesChangeNoBit) { expect_that_chunks_and_batches_change_no_bit(); }

// Random weights have experts that lie close, and where rounding tips a choice, that row's logits are others:
// the middle of the rows' errors is what arithmetic does.
TEST_P(GoldenInt8, LogitsAreNear) {
  const std::string model = GetParam().model;
  auto ids = golden_.get<int32_t>("prompt.0");
  const auto wanted = golden_.get<float>("logits.0");
  const std::vector<float> logits = model_.logits(ids, ids.size());
  const std::vector<int32_t> rows = golden_.rows("logits.0", ids.size());
  const int64_t vocab = model_.spec().vocab;
  std::vector<double> errors;
  for (size_t r = 0; r < rows.size(); ++r) {
    errors.push_back(worst_relative_error(
        {&logits[static_cast<size_t>(rows[r] * vocab)], 1, vocab},
        std::span(wanted).subspan(r * static_cast<size_t>(vocab)).first(static_cast<size_t>(vocab)), {0}));
  }
  std::ranges::sort(errors);
  const double middle = errors[errors.size() / 2];
  RecordProperty("relative_error_middle", fmt::format("{:.2e}", middle));
  RecordProperty("relative_error_worst", fmt::format("{:.2e}", errors.back()));
  // BF16 weights alone, and kernels that do not round for them.
  const bool rounds = model != "laguna" || GetParam().variant == "avx512_bf16" || GetParam().variant == "amx";
  EXPECT_EQ(errors.front() > GetParam().float32_bar(), rounds);
  // Recurrent states and four residual streams keep errors longer.
  EXPECT_LT(middle, !rounds ? GetParam().float32_bar() : model == "glm5_next-nvfp4" ? 0.4 : 5e-2);
}

// Every model on the reference, on every instruction set of this machine and on its GPU.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const char* model :
       {"laguna", "laguna-nvfp4", "laguna-ct", "qwen3_moe-nvfp4", "glm4_moe-nvfp4", "olmoe-nvfp4",
        "mixtral-nvfp4", "minimax_m2-nvfp4", "deepseek_v3-nvfp4", "gpt_oss-mxfp4", "glm5_next-nvfp4"}) {
    const bool bf16_rope = std::string(model) == "laguna";
    all.push_back({model, "reference", "", bf16_rope});
    if (gpu_status().ok()) {
      all.push_back({model, "cuda", "", bf16_rope});
      all.push_back({model, "cuda", "off", bf16_rope});
    }
    for (const cpu::Kernels* kernels : cpu::usable_kernels())
      all.push_back({model, "cpu", kernels->isa, bf16_rope});
  }
  // Those with experts in NVFP4 in the other arithmetic, too.
  for (Case c : std::vector<Case>(all)) {
    const std::string model = c.model;
    if (!model.ends_with("-nvfp4") && model != "laguna-ct") continue;
    if (c.tensor_cores()) continue;  // refuse it
    c.arithmetic.w4a4 = true;
    all.push_back(c);
  }
  return all;
}

// The best kernels here and those for any machine.
std::vector<Case> int8_cases() {
  std::vector<Case> all;
  for (Case c : cases()) {
    if (std::string_view(c.backend) != "cpu" || c.arithmetic.w4a4) continue;
    if (c.variant != cpu::usable_kernels().front()->isa && c.variant != "generic") continue;
    c.cpu_activations = "int8";
    all.push_back(c);
  }
  return all;
}

std::string name_of(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  std::string name = std::string(c.model) + (c.arithmetic.w4a4 ? "_w4a4_" : "_") + c.backend + c.variant;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Models, Golden, testing::ValuesIn(cases()), name_of);
INSTANTIATE_TEST_SUITE_P(Models, GoldenInt8, testing::ValuesIn(int8_cases()), name_of);

}  // namespace
}  // namespace nibble
