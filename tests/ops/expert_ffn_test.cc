#include "ops/expert_layer.h"

namespace nibble::testing {
namespace {

// A product in W4A4: the row in NVFP4, and its second-level scale on the sums.
struct ProductRow {
  RowsBuffer row;
  float g;

  ProductRow(Rows<const float> x, ActScale scale, float input_scale) : row(1, x.cols) {
    g = scale == ActScale::kUnit                        ? 1
        : scale == ActScale::kStatic && input_scale > 0 ? input_scale
                                                        : nvfp4::choose_row_scale(x.row(0), x.cols);
    nvfp4::round_row(x.row(0), x.cols, g, row.view().row(0));
  }
  void linear(OnHostData& ops, const Matrix& w, Rows<float> out) const {
    ops.linear(row.view(), w, out);
    for (int64_t i = 0; i < out.cols; ++i) out.row(0)[i] *= g;
  }
};

// The sum of unfused operations, one (token, expert) pair after the other.
RowsBuffer unfused(OnHostData& ops, const Layer& layer, const ExpertArithmetic& arithmetic = {}) {
  const Shape& s = layer.shape;
  RowsBuffer out(s.tokens, s.model), gate(1, s.width), up(1, s.width), down(1, s.model);
  for (int64_t t = 0; t < s.tokens; ++t) {
    std::fill_n(out.view().row(t), s.model, 0.0f);
    for (int64_t a = 0; a < s.chosen; ++a) {
      const ExpertWeights& w =
          layer.experts[static_cast<size_t>(layer.ids[static_cast<size_t>(t * s.chosen + a)])];
      auto linear = [&](Rows<const float> x, float input_scale, const Matrix& matrix, Rows<float> product) {
        if (!arithmetic.w4a4) return ops.linear(x, matrix, product);
        ProductRow(x, arithmetic.act_scale, input_scale).linear(ops, matrix, product);
      };
      linear(layer.x.read().slice(t, 1), w.input_scale, w.gate, gate.view());
      linear(layer.x.read().slice(t, 1), w.input_scale, w.up, up.view());
      if (w.gate_bias != nullptr) ops.add_bias(gate.view(), w.gate_bias);
      if (w.up_bias != nullptr) ops.add_bias(up.view(), w.up_bias);
      ops.activate(layer.activation, gate.view(), up.view(), gate.view());
      linear(gate.view(), w.down_input_scale, w.down, down.view());
      if (w.down_bias != nullptr) ops.add_bias(down.view(), w.down_bias);
      for (int64_t i = 0; i < s.model; ++i) {
        out.view().row(t)[i] += layer.weights.read().row(t)[a] * down.view().row(0)[i];
      }
    }
  }
  return out;
}

class ExpertFfn : public OnEveryBackend {
 protected:
  // The same bits as the unfused operations; on tensor cores to within what two bfloat16 numbers lose of an
  // activation (2^-17 of it, in both products), against the row's largest output.
  ::testing::AssertionResult is_unfused(const Layer& layer) {
    return is_unfused(layer, expert_ffn(*ops_, layer));
  }
  ::testing::AssertionResult is_unfused(const Layer& layer, const RowsBuffer& found) {
    const RowsBuffer wanted = unfused(*ops_, layer);
    if (!GetParam().tensor_cores()) return same_bits(found.view(), wanted.view());
    for (int64_t t = 0; t < layer.shape.tokens; ++t) {
      float largest = 0;
      for (int64_t i = 0; i < layer.shape.model; ++i)
        largest = std::max(largest, std::fabs(wanted.view().row(t)[i]));
      for (int64_t i = 0; i < layer.shape.model; ++i) {
        const float error = std::fabs(found.view().row(t)[i] - wanted.view().row(t)[i]);
        if (!(error <= largest * 0x1p-14f))
          return ::testing::AssertionFailure()
                 << "row " << t << ", column " << i << ": off by " << error << " of " << largest;
      }
    }
    return ::testing::AssertionSuccess();
  }

  // The one backend that refuses W4A4 at load.
  void expect_cuda() { EXPECT_EQ(ops_->ops().name(), "cuda"); }
};

TEST_P(ExpertFfn, IsTheUnfusedOperations) {
  using enum MatrixFormat;
  Random random(21);
  for (auto [up, down] :
       {std::pair{kNvfp4, kNvfp4}, {kBF16, kBF16}, {kNvfp4, kBF16}, {kBF16, kNvfp4}, {kF32, kF16}}) {
    for (Shape shape : {Shape{16, 4, 64, 32, 1}, Shape{16, 4, 400, 208, 9}, Shape{5, 2, 128, 256, 3},
                        Shape{3, 3, 144, 272, 131}}) {
      Layer layer(random, shape, up, down);
      EXPECT_TRUE(is_unfused(layer)) << matrix_format_name(up) << ", tokens " << shape.tokens;
    }
  }
}

TEST_P(ExpertFfn, W4A4IsTheUnfusedOperations) {
  if (!ops_->ops().does_w4a4()) return expect_cuda();
  Random random(29);
  for (ActScale scale : {ActScale::kRow, ActScale::kStatic, ActScale::kUnit}) {
    for (Shape shape : {Shape{16, 4, 64, 32, 1}, Shape{16, 4, 400, 208, 9}, Shape{3, 3, 144, 272, 131}}) {
      Layer layer(random, shape, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
      layer.add_biases(random);
      // Every third expert has been calibrated.
      for (size_t e = 0; e < layer.experts.size(); e += 3) {
        layer.experts[e].input_scale = 0.0011f;
        layer.experts[e].down_input_scale = 0.0007f;
      }
      const ExpertArithmetic w4a4{.w4a4 = true, .act_scale = scale};
      RowsBuffer found = expert_ffn(*ops_, layer, 0, -1, w4a4);
      EXPECT_TRUE(same_bits(found.view(), unfused(*ops_, layer, w4a4).view())) << "tokens " << shape.tokens;
      EXPECT_FALSE(same_bits(found.view(), expert_ffn(*ops_, layer).view()));
      for (int64_t t = 0; t < shape.tokens; t += 7) {
        EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer, t, 1, w4a4).view(), found.view().slice(t, 1)));
      }
    }
  }
}

// W4A4 has roundings of its own and keeps its bits.
TEST(Int8Experts, AreTheUnfusedOperations) {
  using enum MatrixFormat;
  Random random(71);
  for (const BackendCase& backend : int8_backends()) {
    const std::unique_ptr<OnHostData> ops = make_ops(backend),
                                      exact = make_ops({backend.name, backend.variant});
    for (auto [up, down] : {std::pair{kNvfp4, kNvfp4}, {kMxfp4, kBF16}, {kBF16, kQ4}, {kF32, kF32}}) {
      for (Shape shape : {Shape{16, 4, 64, 32, 1}, Shape{16, 4, 416, 224, 9}, Shape{3, 3, 160, 288, 131}}) {
        Layer layer(random, shape, up, down);
        const RowsBuffer found = expert_ffn(*ops, layer);
        EXPECT_TRUE(same_bits(found.view(), unfused(*ops, layer).view()))
            << backend << ", " << matrix_format_name(up) << ", tokens " << shape.tokens;
        EXPECT_EQ(static_cast<bool>(same_bits(found.view(), expert_ffn(*exact, layer).view())), up == kF32);
        if (up != kNvfp4) continue;
        const ExpertArithmetic w4a4{.w4a4 = true};
        EXPECT_TRUE(same_bits(expert_ffn(*ops, layer, 0, -1, w4a4).view(),
                              expert_ffn(*exact, layer, 0, -1, w4a4).view()));
      }
    }
  }
}

TEST_P(ExpertFfn, W4A4OfRowsOfZerosAndOfWhatIsNoNumber) {
  if (!ops_->ops().does_w4a4()) return expect_cuda();
  Random random(30);
  for (ActScale scale : {ActScale::kRow, ActScale::kUnit}) {
    Layer layer(random, {4, 2, 32, 48, 3}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
    std::fill_n(layer.x.view().row(0), 32, 0.0f);
    layer.x.view().row(1)[17] = kNaN;
    RowsBuffer out = expert_ffn(*ops_, layer, 0, -1, {.w4a4 = true, .act_scale = scale});
    for (int64_t i = 0; i < 32; ++i) {
      EXPECT_EQ(out.view().row(0)[i], 0.0f);
      EXPECT_TRUE(std::isnan(out.view().row(1)[i]));
      EXPECT_TRUE(std::isfinite(out.view().row(2)[i]));
    }
  }
}

TEST_P(ExpertFfn, ManyExpertsFewRows) {
  Random random(22);
  Layer layer(random, {257, 9, 48, 80, 7}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  EXPECT_TRUE(is_unfused(layer));
}

TEST_P(ExpertFfn, AllRowsOnOneExpertAndTwiceInARow) {
  Random random(23);
  Layer layer(random, {4, 2, 80, 48, 20}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  for (size_t i = 0; i < layer.ids.size(); ++i) layer.ids[i] = 2;
  RowsBuffer first = expert_ffn(*ops_, layer);
  EXPECT_TRUE(is_unfused(layer, first));
  EXPECT_TRUE(same_bits(first.view(), expert_ffn(*ops_, layer).view()));
}

TEST_P(ExpertFfn, EveryFormat) {
  Random random(27);
  for (MatrixFormat format : kFormats) {
    for (Shape shape : {Shape{4, 2, 256, 256, 3}, Shape{3, 3, 512, 256, 9}}) {
      Layer layer(random, shape, format, format);
      EXPECT_TRUE(is_unfused(layer)) << matrix_format_name(format) << ", tokens " << shape.tokens;
    }
  }
}

TEST_P(ExpertFfn, BiasesAndActivations) {
  using enum MatrixFormat;
  Random random(28);
  for (auto [up, down] : {std::pair{kMxfp4, kMxfp4}, {kQ4, kQ4}, {kBF16, kQ4}, {kGgufQ4_0, kF32}}) {
    for (ActivationSpec activation : {ActivationSpec{}, ActivationSpec{ActivationSpec::kSiluClamped, 0.5f},
                                      ActivationSpec{ActivationSpec::kGptOss, 0.7f}}) {
      for (Shape shape : {Shape{9, 3, 96, 160, 2}, Shape{8, 4, 160, 96, 33}, Shape{8, 4, 96, 160, 80}}) {
        Layer layer(random, shape, up, down);
        layer.activation = activation;
        RowsBuffer without = expert_ffn(*ops_, layer);
        layer.add_biases(random);
        RowsBuffer with = expert_ffn(*ops_, layer);
        EXPECT_TRUE(is_unfused(layer, with)) << matrix_format_name(up);
        EXPECT_FALSE(same_bits(with.view(), without.view()));
      }
    }
  }
}

// Layers whose experts differ in format, as real files have them in places.
TEST_P(ExpertFfn, MixedFormats) {
  Random random(24);
  Shape shape{5, 2, 256, 512, 6};
  // One packing for all (the fused path), two kinds of it, and one matrix of another.
  const std::vector<std::vector<MatrixFormat>> mixes = {
      {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4},
      {MatrixFormat::kBF16, MatrixFormat::kF8E4M3, MatrixFormat::kGgufQ6K, MatrixFormat::kFp8Block},
      {MatrixFormat::kGgufNvfp4, MatrixFormat::kNvfp4},  // one on tensor cores
      {std::begin(kFormats), std::end(kFormats)}};
  for (const std::vector<MatrixFormat>& mix : mixes) {
    Layer layer(random, shape, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
    std::vector<TestMatrix> others;
    others.reserve(layer.experts.size() * 3);
    for (ExpertWeights& expert : layer.experts) {
      for (Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        others.emplace_back(random, mix[others.size() % mix.size()], matrix->n, matrix->k, 0.02f);
        *matrix = others.back().matrix;
      }
    }
    EXPECT_TRUE(is_unfused(layer)) << matrix_format_name(mix.front());
  }
  Layer layer(random, shape, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  TestMatrix up(random, MatrixFormat::kBF16, shape.width, shape.model);
  layer.experts[1].up = up.matrix;
  EXPECT_TRUE(is_unfused(layer));
}

TEST_P(ExpertFfn, ChunksAndThreadsChangeNoBit) {
  Random random(25);
  Layer layer(random, {8, 3, 192, 144, 35}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  RowsBuffer wanted = expert_ffn(*ops_, layer);
  for (int64_t chunk : {1, 2, 8, 17}) {
    for (int64_t t = 0; t < 35; t += chunk) {
      const int64_t count = std::min<int64_t>(chunk, 35 - t);
      EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer, t, count).view(), wanted.view().slice(t, count)));
    }
  }
  for (int threads : {1, 2, 3, 7}) {
    std::unique_ptr<OnHostData> ops = make_ops(GetParam(), threads);
    EXPECT_TRUE(same_bits(expert_ffn(*ops, layer).view(), wanted.view())) << threads << " threads";
  }
}

// Groups of 1, 2, 8 and 130 rows beside it: each of the three experts has every row.
TEST_P(ExpertFfn, ARowAloneIsTheSameRowInAGroup) {
  Random random(33);
  using enum MatrixFormat;
  for (MatrixFormat format : {kNvfp4, kMxfp4, kQ4, kBF16}) {
    const bool of_32 = format == kMxfp4 || format == kQ4;
    const int64_t columns = of_32 ? 160 : 144, width = of_32 ? 288 : 272;
    Layer layer(random, {3, 3, columns, width, 131}, format, format);
    const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(layer.experts);
    auto rows = [&](int64_t first, int64_t count) { return expert_ffn(*ops_, layer, *placed, first, count); };
    const RowsBuffer all = rows(0, 131);
    for (int64_t t = 0; t < 131; ++t)
      EXPECT_TRUE(same_bits(rows(t, 1).view(), all.view().slice(t, 1))) << matrix_format_name(format) << t;
    for (auto [first, count] : {std::pair{0, 2}, {129, 2}, {5, 3}, {60, 9}, {0, 130}, {1, 130}}) {
      EXPECT_TRUE(same_bits(rows(first, count).view(), all.view().slice(first, count)))
          << matrix_format_name(format) << ", " << count << " rows from " << first;
    }
    for (int call = 0; call < 5; ++call)
      EXPECT_TRUE(same_bits(rows(0, 131).view(), all.view())) << "call " << call;
  }
}

// A recorded step serves whatever its buffers hold when it runs again: other rows, other experts.
TEST_P(ExpertFfn, ARepeatedStepTakesWhatItsBuffersHoldNow) {
  Random random(34);
  Ops& ops = ops_->ops();
  Memory& memory = ops.memory();
  auto allocate = [&](int64_t count) { return Buffer::allocate(memory, count * 4, "test data").value(); };
  uint64_t key = 0;
  for (int64_t tokens : {1, 3, 8, 9, 40, 80}) {
    Layer layer(random, {16, 4, 160, 96, tokens}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
    const Shape& s = layer.shape;
    const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(layer.experts);
    const int64_t routed = tokens * s.chosen;
    const Buffer x = allocate(tokens * s.model), ids = allocate(routed), weights = allocate(routed),
                 logits = allocate(tokens * s.experts), out = allocate(tokens * s.model),
                 gathered = allocate(routed * s.model), gate = allocate(routed * s.width),
                 up = allocate(routed * s.width), down = allocate(routed * s.model);
    const RouteArgs route = {.logits = {logits.as<float>(), tokens, s.experts},
                             .spec = {},
                             .ids = {ids.as<int32_t>(), tokens, s.chosen},
                             .weights = {weights.as<float>(), tokens, s.chosen}};
    const ExpertFfnArgs ffn = {.x = {x.as<float>(), tokens, s.model},
                               .ids = route.ids,
                               .weights = route.weights,
                               .experts = *placed,
                               .activation = {},
                               .scratch = {.gathered = {gathered.as<float>(), routed, s.model},
                                           .gate = {gate.as<float>(), routed, s.width},
                                           .up = {up.as<float>(), routed, s.width},
                                           .down = {down.as<float>(), routed, s.model}},
                               .out = {out.as<float>(), tokens, s.model}};
    struct Step {
      std::vector<float> x, weights, logits;
      std::vector<int32_t> ids;
    };
    std::vector<Step> steps;
    for (int i = 0; i < 5; ++i) {
      layer.ids.clear();
      layer.choose(random);
      steps.push_back({random.floats(tokens * s.model), random.floats(routed),
                       random.floats(tokens * s.experts), layer.ids});
    }
    for (bool routes : {false, true}) {
      ++key;
      auto run = [&](const Step& step, bool repeats) {
        RowsBuffer found(tokens, s.model);
        for (auto [buffer, from] : {std::pair<const Buffer*, const void*>{&x, step.x.data()},
                                    {&weights, step.weights.data()},
                                    {&logits, step.logits.data()},
                                    {&ids, step.ids.data()},
                                    {&out, found.view().data}})
          memory.upload(buffer->as<void>(), from, buffer->bytes());
        auto work = [&] { routes ? ops.routed_ffn(route, ffn) : ops.expert_ffn(ffn); };
        repeats ? ops.repeat(key, work) : work();
        memory.download(found.view().data, out.as<void>(), out.bytes());
        return found;
      };
      std::vector<RowsBuffer> wanted;
      for (const Step& step : steps) wanted.push_back(run(step, false));
      EXPECT_FALSE(same_bits(wanted[0].view(), wanted[1].view()));
      for (size_t i = 0; i < steps.size(); ++i) {
        EXPECT_TRUE(same_bits(run(steps[i], true).view(), wanted[i].view()))
            << tokens << " rows, time " << i << (routes ? ", routed" : "");
      }
    }
  }
}

// 3, 5, 9, 17 and 34 chunks of 128 columns: tensor cores cut K in one to eight parts, and those of few rows
// go over it twice.
TEST_P(ExpertFfn, EveryCutOfK) {
  Random random(29);
  for (auto [model, width] : {std::pair{4272, 80}, {96, 4272}, {2064, 336}, {1104, 592}, {336, 2064}}) {
    for (int64_t tokens : {12, 70}) {
      Layer layer(random, {2, 1, model, width, tokens}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
      const RowsBuffer all = expert_ffn(*ops_, layer);
      EXPECT_TRUE(is_unfused(layer, all)) << model << " x " << width << ", tokens " << tokens;
      for (int64_t t : {int64_t{0}, tokens - 1}) {
        EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer, t, 1).view(), all.view().slice(t, 1)))
            << model << " x " << width << ", row " << t << " of " << tokens;
      }
    }
  }
}

// What a backend says that it copied may be lost behind it.
TEST_P(ExpertFfn, CopiedWeightsAreNotReadAgain) {
  Random random(31);
  for (MatrixFormat format : kFormats) {
    if (!ops_->ops().copies_weights(format)) continue;
    Layer layer(random, {4, 2, 256, 256, 5}, format, format);
    const RowsBuffer wanted = expert_ffn(*ops_, layer);
    const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(layer.experts);
    for (TestMatrix& m : layer.matrices) {
      std::fill(m.codes.begin(), m.codes.end(), 0xFF);
      std::fill(m.scales.begin(), m.scales.end(), 0xFF);
    }
    EXPECT_TRUE(same_bits(expert_ffn(*ops_, layer, *placed, 0, 5).view(), wanted.view()))
        << matrix_format_name(format);
  }
}

TEST_P(ExpertFfn, NoTokensIsNoWork) {
  Random random(26);
  Layer layer(random, {2, 1, 16, 16, 1}, MatrixFormat::kNvfp4, MatrixFormat::kNvfp4);
  expert_ffn(*ops_, layer, 0, 0);
}

INSTANTIATE_ON_ALL_BACKENDS(ExpertFfn);

}  // namespace
}  // namespace nibble::testing
