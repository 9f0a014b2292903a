// Operations that are several of the others in one: they give the bits of those, on every backend, and a row
// gets the same bits however many rows there are.
#include "ops/paged_cache.h"

namespace nibble::testing {
namespace {

class Fused : public OnEveryBackend {};

// Widths on both sides of what a kernel prepares for itself, with tails.
constexpr int64_t kWidths[] = {64, 160, 1536, 1056, 4224};
constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 7, 8, 9, 40, 150}, kMostRows = 150;
constexpr float kEps = 1e-5f;

TEST_P(Fused, NormAndProducts) {
  Random random(1);
  // Aligned rows and others; and a width that is no multiple of anything, which 4-bit weights cannot have.
  constexpr int64_t kOdd = 1041;
  std::vector<std::pair<int64_t, int64_t>> cases = {{kOdd, 0}};  // width, gap
  for (int64_t k : kWidths) cases.insert(cases.end(), {{k, 0}, {k, 3}});
  for (const auto& [width, gap] : cases) {
    const int64_t k = width;
    const std::vector<float> weight = random.floats(k), bias = random.floats(50);
    // Of one format, and of several.
    using enum MatrixFormat;
    for (auto [of_first, of_second] : {std::pair{kBF16, kBF16}, {kNvfp4, kNvfp4}, {kBF16, kNvfp4}}) {
      if (k == kOdd && of_second != kBF16) continue;
      const TestMatrix first(random, of_first, 50, k), second(random, of_second, 37, k);
      const RowsBuffer x = RowsBuffer::random(random, kMostRows, k, gap),
                       residual = RowsBuffer::random(random, kMostRows, 37, 1);
      auto fused = [&](int64_t rows, RowsBuffer& normed, RowsBuffer& out, RowsBuffer& sum) {
        RowsBuffer room(rows, 37);
        const OnHostData::HostProduct together[] = {
            {first.matrix, bias.data(), out.view()},
            {second.matrix, nullptr, room.view(), sum.view().slice(0, rows)}};
        ops_->norm_linears(x.read().slice(0, rows), weight.data(), kEps, normed.view(), together);
      };
      RowsBuffer wanted_normed(kMostRows, k), wanted_first(kMostRows, 50), wanted_sum = residual;
      fused(kMostRows, wanted_normed, wanted_first, wanted_sum);

      RowsBuffer apart_normed(kMostRows, k), apart_first(kMostRows, 50), apart_second(kMostRows, 37),
          apart_sum = residual;
      ops_->rms_norm(x.read(), weight.data(), kEps, apart_normed.view());
      const OnHostData::HostProduct apart[] = {{first.matrix, bias.data(), apart_first.view()},
                                               {second.matrix, nullptr, apart_second.view()}};
      ops_->linears(apart_normed.read(), apart);
      ops_->add(apart_second.read(), apart_sum.view());
      EXPECT_TRUE(same_bits(wanted_normed.read(), apart_normed.read())) << k;
      EXPECT_TRUE(same_bits(wanted_first.read(), apart_first.read())) << k;
      EXPECT_TRUE(same_bits(wanted_sum.read(), apart_sum.read())) << k;
      for (int64_t rows : kRows) {
        RowsBuffer normed(rows, k, 2), out(rows, 50, 1), sum = residual;
        fused(rows, normed, out, sum);
        EXPECT_TRUE(same_bits(normed.read(), wanted_normed.read().slice(0, rows))) << k << ", rows " << rows;
        EXPECT_TRUE(same_bits(out.read(), wanted_first.read().slice(0, rows))) << k << ", rows " << rows;
        EXPECT_TRUE(same_bits(sum.read().slice(0, rows), wanted_sum.read().slice(0, rows)))
            << k << ", rows " << rows;
        EXPECT_TRUE(same_bits(sum.read().slice(rows, kMostRows - rows),
                              residual.read().slice(rows, kMostRows - rows)));
        EXPECT_TRUE(normed.gaps_untouched() && out.gaps_untouched() && sum.gaps_untouched());
      }
      // In place.
      RowsBuffer in_place = x, out(kMostRows, 50), room(kMostRows, 37);
      const OnHostData::HostProduct products[] = {{first.matrix, bias.data(), out.view()},
                                                  {second.matrix, nullptr, room.view()}};
      ops_->norm_linears(in_place.read().slice(0, 2), weight.data(), kEps, in_place.view().slice(0, 2),
                         {products, 0});
      EXPECT_TRUE(same_bits(in_place.read().slice(0, 2), apart_normed.read().slice(0, 2)));
    }
  }
}

TEST_P(Fused, GluAndProduct) {
  Random random(2);
  const ActivationSpec kinds[] = {{}, {.kind = ActivationSpec::kGptOss, .limit = 1.5f, .alpha = 1.702f}};
  for (const ActivationSpec& spec : kinds) {
    for (MatrixFormat format :
         {MatrixFormat::kBF16, MatrixFormat::kMxfp4, MatrixFormat::kQ4, MatrixFormat::kF32}) {
      for (int64_t k : kWidths) {
        const TestMatrix down(random, format, 70, k);
        const RowsBuffer gate = RowsBuffer::random(random, kMostRows, k, 1),
                         up = RowsBuffer::random(random, kMostRows, k, 2),
                         residual = RowsBuffer::random(random, kMostRows, 70);
        RowsBuffer activated(kMostRows, k), wanted(kMostRows, 70), wanted_sum = residual;
        ops_->activate(spec, gate.read(), up.read(), activated.view());
        ops_->linear(activated.read(), down.matrix, wanted.view());
        ops_->add(wanted.read(), wanted_sum.view());
        for (int64_t rows : kRows) {
          RowsBuffer room = gate, out(rows, 70, 3), sum = residual, unused(rows, 70);
          ops_->glu_linear(spec, room.view().slice(0, rows), up.read().slice(0, rows),
                           {down.matrix, nullptr, out.view()});
          EXPECT_TRUE(same_bits(out.read(), wanted.read().slice(0, rows))) << k << ", rows " << rows;
          EXPECT_TRUE(out.gaps_untouched());
          room = gate;
          ops_->glu_linear(spec, room.view().slice(0, rows), up.read().slice(0, rows),
                           {down.matrix, nullptr, unused.view(), sum.view().slice(0, rows)});
          EXPECT_TRUE(same_bits(sum.read().slice(0, rows), wanted_sum.read().slice(0, rows)));
        }
      }
    }
  }
}

TEST_P(Fused, PrepareAttend) {
  constexpr int64_t kPositions = 40, kPage = 16;
  for (Heads heads : {Heads{4, 2, 64}, Heads{3, 1, 128}, Heads{2, 2, 20, 12}, Heads{5, 1, 6},
                      Heads{2, 1, 256}, Heads{1, 1, 512}}) {
    for (RopeStyle style : {RopeStyle::kHalves, RopeStyle::kInterleaved}) {
      for (bool normed : {false, true}) {
        Random random(3);
        constexpr int64_t kRowCount = 7;
        const int64_t rotary = heads.dim / 4 * 2 + 2, keys = heads.kv * heads.dim,
                      values = heads.kv * heads.value_width();
        Step step = random_step(random, heads, kRowCount, 2, kPositions);
        for (size_t t = 0; t < kRowCount; ++t) step.positions[t] = static_cast<int32_t>(5 * t);
        const RowsBuffer k = RowsBuffer::random(random, kRowCount, keys, 1),
                         v = RowsBuffer::random(random, kRowCount, values, 2);
        const std::vector<float> q_norm = random.floats(heads.dim), k_norm = random.floats(heads.dim),
                                 frequencies = random.floats(rotary / 2);
        RowsBuffer table(kRowCount, rotary);
        ops_->rope_table(step.positions.data(), frequencies, 1.0f, table.view());

        Cache wanted(*ops_, heads, 2, kPositions, kPage, pages_for(kPositions, kPage), 4);
        RowsBuffer wanted_q = step.q, wanted_k = k;
        if (normed) {
          for (int64_t h = 0; h < heads.query; ++h) {
            const Rows<float> head(wanted_q.view().data + h * heads.dim, kRowCount, heads.dim,
                                   wanted_q.view().stride);
            ops_->rms_norm(head, q_norm.data(), kEps, head);
          }
          for (int64_t g = 0; g < heads.kv; ++g) {
            const Rows<float> head(wanted_k.view().data + g * heads.dim, kRowCount, heads.dim,
                                   wanted_k.view().stride);
            ops_->rms_norm(head, k_norm.data(), kEps, head);
          }
        }
        ops_->rope(wanted_q.view(), heads.dim, table.read(), style);
        ops_->rope(wanted_k.view(), heads.dim, table.read(), style);
        ops_->write_kv(wanted_k.read(), v.read(), step.rows(0, kRowCount), wanted.view());

        for (int64_t at_once : {kRowCount, int64_t{1}}) {
          Cache cache(*ops_, heads, 2, kPositions, kPage, pages_for(kPositions, kPage), 4);
          RowsBuffer q = step.q, room = k;
          for (int64_t t = 0; t < kRowCount; t += at_once) {
            ops_->prepare_attend({.q = q.view().slice(t, at_once),
                                  .k = room.view().slice(t, at_once),
                                  .v = v.read().slice(t, at_once),
                                  .q_norm = normed ? q_norm.data() : nullptr,
                                  .k_norm = normed ? k_norm.data() : nullptr,
                                  .eps = kEps,
                                  .rope_table = table.read().slice(t, at_once),
                                  .rope_style = style,
                                  .rows = step.rows(t, at_once),
                                  .kv = cache.view()});
          }
          EXPECT_TRUE(same_bits(q.read(), wanted_q.read())) << "head dim " << heads.dim;
          for (int64_t slot : {0, 1}) {
            for (int64_t p = 0; p < kPositions; ++p) {
              for (int64_t g = 0; g < heads.kv; ++g) {
                EXPECT_TRUE(same_bits(cache.key(slot, p, g), wanted.key(slot, p, g), heads.dim));
                EXPECT_TRUE(
                    same_bits(cache.value(slot, p, g), wanted.value(slot, p, g), heads.value_width()));
              }
            }
          }
        }
      }
    }
  }
}

// A backend may give a thread or block fewer heads where there are few rows.
TEST_P(Fused, HowManyRowsPrepareAndAttendChangesNoBit) {
  constexpr int64_t kRowCount = 40, kPositions = 20, kPage = 16;
  const Heads heads{45, 5, 16};
  Random random(12);
  Step step = random_step(random, heads, kRowCount, kRowCount, kPositions);
  for (size_t t = 0; t < kRowCount; ++t) {
    step.positions[t] = static_cast<int32_t>(t % kPositions);
    step.slots[t] = static_cast<int32_t>(kRowCount - 1 - static_cast<int64_t>(t));
  }
  const RowsBuffer k = RowsBuffer::random(random, kRowCount, heads.kv * heads.dim, 1),
                   v = RowsBuffer::random(random, kRowCount, heads.kv * heads.dim),
                   gate = RowsBuffer::random(random, kRowCount, heads.query, 3);
  const std::vector<float> norm = random.floats(heads.dim), frequencies = random.floats(heads.dim / 2);
  RowsBuffer table(kRowCount, heads.dim);
  ops_->rope_table(step.positions.data(), frequencies, 1.0f, table.view());
  const Cache before(*ops_, heads, kRowCount, kPositions, kPage, pages_for(kPositions, kPage), 4);
  auto run = [&](int64_t first, int64_t rows) {
    Cache cache = before;
    RowsBuffer q = step.q, room = k, out(kRowCount, heads.query * heads.dim);
    RowsOfStep of_rows = step.rows(first, rows);
    of_rows.one_a_sequence = true;
    ops_->prepare_and_attend({.q = q.view().slice(first, rows),
                              .k = room.view().slice(first, rows),
                              .v = v.read().slice(first, rows),
                              .q_norm = norm.data(),
                              .k_norm = norm.data(),
                              .eps = kEps,
                              .rope_table = table.read().slice(first, rows),
                              .rows = of_rows,
                              .kv = cache.view()},
                             {.q = q.read().slice(first, rows),
                              .kv = cache.view(),
                              .rows = of_rows,
                              .scale = attend_scale(heads.dim),
                              .out = out.view().slice(first, rows),
                              .gate_kind = OutputGate::kSoftplusHead,
                              .gate = gate.read().slice(first, rows)});
    return out;
  };
  const RowsBuffer together = run(0, kRowCount);
  for (auto [first, rows] : {std::pair<int64_t, int64_t>{0, 1}, {39, 1}, {17, 3}, {4, 36}}) {
    const RowsBuffer some = run(first, rows);
    EXPECT_TRUE(same_bits(some.read().slice(first, rows), together.read().slice(first, rows))) << first;
  }
}

TEST_P(Fused, PrepareAndAttend) {
  constexpr int64_t kPositions = 600, kPage = 16, kRowCount = 3;  // so that some rows take several pieces
  const int32_t positions[kRowCount] = {599, 0, 270};
  struct Case {
    Heads heads;
    OutputGate gate = OutputGate::kNone;
    bool normed = false;
    int64_t window = 0;
  };
  using enum OutputGate;
  for (const Case& c :
       {Case{{4, 2, 64}, kNone, true, 0}, Case{{9, 1, 128}, kSoftplusHead, true, 512},
        Case{{2, 2, 20, 12}, kSigmoidElement, false, 0}, Case{{5, 1, 6}, kSoftplusElement, false, 100}}) {
    const Heads& heads = c.heads;
    Random random(11);
    const int64_t rotary = heads.dim / 4 * 2 + 2, width = heads.query * heads.value_width();
    Step step = random_step(random, heads, kRowCount, kRowCount, kPositions);
    for (size_t t = 0; t < kRowCount; ++t) {
      step.positions[t] = positions[t];
      step.slots[t] = static_cast<int32_t>((t + 1) % kRowCount);
    }
    const RowsBuffer k = RowsBuffer::random(random, kRowCount, heads.kv * heads.dim, 1),
                     v = RowsBuffer::random(random, kRowCount, heads.kv * heads.value_width(), 2),
                     gate = RowsBuffer::random(random, kRowCount,
                                               c.gate == kSoftplusHead ? heads.query : width, 2);
    const std::vector<float> q_norm = random.floats(heads.dim), k_norm = random.floats(heads.dim),
                             frequencies = random.floats(rotary / 2);
    RowsBuffer table(kRowCount, rotary);
    ops_->rope_table(step.positions.data(), frequencies, 1.0f, table.view());

    auto run = [&](bool together, int64_t at_once, Cache& cache, RowsBuffer& out) {
      RowsBuffer q = step.q, room = k;
      for (int64_t t = 0; t < kRowCount; t += at_once) {
        RowsOfStep rows = step.rows(t, at_once);
        rows.one_a_sequence = true;
        const PrepareAttendArgs prepare = {.q = q.view().slice(t, at_once),
                                           .k = room.view().slice(t, at_once),
                                           .v = v.read().slice(t, at_once),
                                           .q_norm = c.normed ? q_norm.data() : nullptr,
                                           .k_norm = c.normed ? k_norm.data() : nullptr,
                                           .eps = kEps,
                                           .rope_table = table.read().slice(t, at_once),
                                           .rows = rows,
                                           .kv = cache.view()};
        const AttendArgs attend = {.q = q.read().slice(t, at_once),
                                   .kv = cache.view(),
                                   .rows = rows,
                                   .window = c.window,
                                   .scale = attend_scale(heads.dim),
                                   .out = out.view().slice(t, at_once),
                                   .gate_kind = c.gate,
                                   .gate = gate.read().slice(t, at_once)};
        if (together) {
          ops_->prepare_and_attend(prepare, attend);
        } else {
          ops_->prepare_attend(prepare);
          ops_->attend(attend);
        }
      }
    };
    Cache wanted_cache(*ops_, heads, kRowCount, kPositions, kPage, pages_for(kPositions, kPage), 4);
    RowsBuffer wanted(kRowCount, width);
    run(false, kRowCount, wanted_cache, wanted);
    for (int64_t at_once : {kRowCount, int64_t{1}}) {
      Cache cache(*ops_, heads, kRowCount, kPositions, kPage, pages_for(kPositions, kPage), 4);
      RowsBuffer out(kRowCount, width, 1);
      run(true, at_once, cache, out);
      EXPECT_TRUE(same_bits(out.read(), wanted.read())) << "head dim " << heads.dim;
      EXPECT_TRUE(out.gaps_untouched());
      for (int64_t slot = 0; slot < kRowCount; ++slot) {
        for (int64_t p = 0; p < kPositions; ++p) {
          for (int64_t g = 0; g < heads.kv; ++g) {
            ASSERT_TRUE(same_bits(cache.key(slot, p, g), wanted_cache.key(slot, p, g), heads.dim));
            ASSERT_TRUE(
                same_bits(cache.value(slot, p, g), wanted_cache.value(slot, p, g), heads.value_width()));
          }
        }
      }
    }
  }
}

TEST_P(Fused, AttendAndGate) {
  Random random(5);
  constexpr int64_t kPositions = 600;
  const Heads heads{4, 2, 32};
  Cache cache(*ops_, heads, 2, kPositions, 16, pages_for(kPositions, 16), 6);
  const Step step = random_step(random, heads, 6, 2, kPositions);
  const int64_t width = heads.query * heads.dim;
  AttendArgs args = {
      .q = step.q.read(), .kv = cache.view(), .rows = step.rows(0, 6), .scale = attend_scale(heads.dim)};
  using enum OutputGate;
  for (OutputGate kind : {kSoftplusHead, kSoftplusElement, kSigmoidElement}) {
    const RowsBuffer gate = RowsBuffer::random(random, 6, kind == kSoftplusHead ? heads.query : width, 2);
    RowsBuffer wanted(6, width), out(6, width, 1);
    args.gate_kind = kNone;
    args.out = wanted.view();
    ops_->attend(args);
    ops_->gate_output(kind, gate.read(), heads.dim, wanted.view());
    args.gate_kind = kind;
    args.gate = gate.read();
    args.out = out.view();
    ops_->attend(args);
    EXPECT_TRUE(same_bits(out.read(), wanted.read()));
    EXPECT_TRUE(out.gaps_untouched());
  }
}

struct Experts {
  std::vector<TestMatrix> matrices;
  std::vector<ExpertWeights> weights;

  Experts(Random& random, int64_t count, int64_t model, int64_t width) {
    matrices.reserve(static_cast<size_t>(3 * count));
    for (int64_t e = 0; e < count; ++e) {
      matrices.emplace_back(random, MatrixFormat::kNvfp4, width, model);
      matrices.emplace_back(random, MatrixFormat::kNvfp4, width, model);
      matrices.emplace_back(random, MatrixFormat::kNvfp4, model, width);
      const size_t at = static_cast<size_t>(3 * e);
      weights.push_back({matrices[at].matrix, matrices[at + 1].matrix, matrices[at + 2].matrix});
    }
  }
};

TEST_P(Fused, RoutingExpertsAndSum) {
  Random random(7);
  constexpr int64_t kExperts = 5, kChosen = 2, kWidth = 96, kExpertWidth = 64, kTokens = 6;
  const Experts experts(random, kExperts, kWidth, kExpertWidth);
  const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(experts.weights);
  const float bias[kExperts] = {0.1f, -0.3f, 0.0f, 0.2f, 0.05f};
  const RowsBuffer x = RowsBuffer::random(random, kTokens, kWidth, 1),
                   logits = RowsBuffer::random(random, kTokens, kExperts, 1),
                   residual = RowsBuffer::random(random, kTokens, kWidth, 2);
  for (RouterScore score : {RouterScore::kSigmoid, RouterScore::kSoftmaxAll, RouterScore::kSoftmaxChosen}) {
    for (int64_t tokens : {int64_t{1}, kTokens}) {
      const int64_t routed = tokens * kChosen;
      RowsBuffer gathered(routed, kWidth), gate(routed, kExpertWidth), up(routed, kExpertWidth),
          down(routed, kWidth), weights(tokens, kChosen), weights_apart(tokens, kChosen);
      std::vector<int32_t> ids(static_cast<size_t>(routed)), ids_apart = ids;
      auto route = [&](std::vector<int32_t>& to, RowsBuffer& to_weights) {
        return RouteArgs{.logits = logits.read().slice(0, tokens),
                         .bias_E = bias,
                         .spec = {.score = score},
                         .ids = {to.data(), tokens, kChosen},
                         .weights = to_weights.view()};
      };
      auto ffn = [&](const RouteArgs& args, Rows<float> out, Rows<float> add_to) {
        return ExpertFfnArgs{.x = x.read().slice(0, tokens),
                             .ids = args.ids,
                             .weights = args.weights,
                             .experts = *placed,
                             .activation = {},
                             .scratch = {gathered.view(), gate.view(), up.view(), down.view()},
                             .out = out,
                             .add_to = add_to};
      };
      RowsBuffer wanted(tokens, kWidth), out(tokens, kWidth), room(tokens, kWidth), wanted_sum = residual,
                                                                                    sum = residual;
      const RouteArgs apart = route(ids_apart, weights_apart), together = route(ids, weights);
      ops_->route(apart);
      ops_->expert_ffn(ffn(apart, wanted.view(), {}));
      ops_->add(wanted.read(), wanted_sum.view().slice(0, tokens));

      ops_->routed_ffn(together, ffn(together, out.view(), {}));
      EXPECT_EQ(ids, ids_apart);
      EXPECT_TRUE(same_bits(weights.read(), weights_apart.read()));
      EXPECT_TRUE(same_bits(out.read(), wanted.read()));
      ops_->routed_ffn(together, ffn(together, room.view(), sum.view().slice(0, tokens)));
      EXPECT_TRUE(same_bits(sum.read(), wanted_sum.read()));
      EXPECT_TRUE(sum.gaps_untouched());
    }
  }
}

// More (row, expert) pairs than a block groups at a time, and after them fewer, with other choices.
TEST_P(Fused, ManyRowsAreRoutedAndGrouped) {
  Random random(23);
  constexpr int64_t kExperts = 12, kChosen = 8, kWidth = 64, kExpertWidth = 32, kMost = 130;
  const Experts experts(random, kExperts, kWidth, kExpertWidth);
  const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(experts.weights);
  const RowsBuffer x = RowsBuffer::random(random, kMost, kWidth);
  for (int64_t tokens : {kMost, int64_t{40}, kMost}) {
    const int64_t routed = tokens * kChosen;
    const RowsBuffer logits = RowsBuffer::random(random, tokens, kExperts);
    RowsBuffer gathered(routed, kWidth), gate(routed, kExpertWidth), up(routed, kExpertWidth),
        down(routed, kWidth);
    auto run = [&](bool together) {
      RowsBuffer weights(tokens, kChosen), out(tokens, kWidth);
      std::vector<int32_t> ids(static_cast<size_t>(routed), -1);
      const RouteArgs route = {.logits = logits.read(),
                               .spec = {},
                               .ids = {ids.data(), tokens, kChosen},
                               .weights = weights.view()};
      const ExpertFfnArgs ffn = {.x = x.read().slice(0, tokens),
                                 .ids = route.ids,
                                 .weights = route.weights,
                                 .experts = *placed,
                                 .activation = {},
                                 .scratch = {gathered.view(), gate.view(), up.view(), down.view()},
                                 .out = out.view()};
      if (together) {
        ops_->routed_ffn(route, ffn);
      } else {
        ops_->route(route);
        ops_->expert_ffn(ffn);
      }
      return std::pair{ids, out};
    };
    const auto apart = run(false), together = run(true);
    EXPECT_EQ(together.first, apart.first) << tokens;
    EXPECT_TRUE(same_bits(together.second.read(), apart.second.read())) << tokens;
  }
}

// Few rows may be routed and grouped in another way than many (on cuda up to 8 with an aligned x, up to 128
// choices): ids, weights and outputs are those of `route` and of many rows, whatever the router.
TEST_P(Fused, FewRowsAreRoutedAsMany) {
  constexpr int64_t kWidth = 96, kExpertWidth = 64, kTokens = 12;
  struct Case {
    int64_t experts, chosen;
  };
  Random random(8);
  for (const Case c : {Case{5, 2}, Case{40, 6}, Case{70, 16}}) {
    const Experts experts(random, c.experts, kWidth, kExpertWidth);
    const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(experts.weights);
    const RowsBuffer x = RowsBuffer::random(random, kTokens, kWidth), x_apart = x.with_gap(1);
    const std::vector<float> bias = random.floats(c.experts);
    RowsBuffer logits = RowsBuffer::random(random, kTokens, c.experts, 1);
    for (int64_t e = 0; e < c.experts; ++e) {
      logits.view().row(1)[e] = 0.5f;                       // all equal
      logits.view().row(2)[e] = static_cast<float>(e % 3);  // many equal
      logits.view().row(3)[e] = e % 2 == 0 ? 0.0f : -0.0f;  // equal, too
      if (e % 4 != 1) logits.view().row(4)[e] = kNaN;       // chosen last
      logits.view().row(5)[e] = kNaN;
      if (e % 5 == 2) logits.view().row(6)[e] = e % 2 == 0 ? INFINITY : -INFINITY;
      logits.view().row(7)[e] = logits.view().row(0)[e];       // the same experts
      if (e == c.experts / 2) logits.view().row(8)[e] = 1000;  // one above all
    }
    const RouterSpec specs[] = {
        {.score = RouterScore::kSigmoid},
        {.score = RouterScore::kSigmoid, .renormalize_epsilon = 0.25f, .scale = 2.5f},
        {.score = RouterScore::kSqrtSoftplus, .logit_softcap = 3, .renormalize = false},
        {.score = RouterScore::kSoftmaxAll, .renormalize = false},
        {.score = RouterScore::kSoftmaxAll, .logit_softcap = 2},
        {.score = RouterScore::kSoftmaxChosen, .scale = 3},
        {.score = RouterScore::kSigmoid, .n_group = 5, .topk_group = 2},
    };
    for (const RouterSpec& spec : specs) {
      if (spec.topk_group < spec.n_group && c.chosen > c.experts / spec.n_group * spec.topk_group) continue;
      for (const float* bias_E : {static_cast<const float*>(nullptr), bias.data()}) {
        struct Result {
          std::vector<int32_t> ids;
          RowsBuffer weights, out;
        };
        enum class How { kApart, kTogether, kExpertsAlone };
        auto run = [&](How how, const RowsBuffer& rows, int64_t first, int64_t tokens, const Result* chosen) {
          const int64_t routed = tokens * c.chosen;
          RowsBuffer gathered(routed, kWidth), gate(routed, kExpertWidth), up(routed, kExpertWidth),
              down(routed, kWidth);
          Result r{std::vector<int32_t>(static_cast<size_t>(routed), -1), RowsBuffer(tokens, c.chosen, 1),
                   RowsBuffer(tokens, kWidth, 1)};
          if (chosen != nullptr) {
            std::copy_n(chosen->ids.begin() + first * c.chosen, routed, r.ids.begin());
            for (int64_t t = 0; t < tokens; ++t)
              std::copy_n(chosen->weights.read().row(first + t), c.chosen, r.weights.view().row(t));
          }
          const RouteArgs route{.logits = logits.read().slice(first, tokens),
                                .bias_E = bias_E,
                                .spec = spec,
                                .ids = {r.ids.data(), tokens, c.chosen},
                                .weights = r.weights.view()};
          const ExpertFfnArgs ffn{.x = rows.read().slice(first, tokens),
                                  .ids = route.ids,
                                  .weights = route.weights,
                                  .experts = *placed,
                                  .activation = {},
                                  .scratch = {gathered.view(), gate.view(), up.view(), down.view()},
                                  .out = r.out.view()};
          if (how == How::kTogether) ops_->routed_ffn(route, ffn);
          if (how == How::kApart) ops_->route(route);
          if (how != How::kTogether) ops_->expert_ffn(ffn);
          return r;
        };
        const Result wanted = run(How::kApart, x_apart, 0, kTokens, nullptr);
        for (int64_t tokens : {1, 2, 3, 5, 8, 9}) {
          for (int64_t first : {int64_t{0}, kTokens - tokens}) {
            for (How how : {How::kTogether, How::kExpertsAlone}) {
              const Result found = run(how, x, first, tokens, how == How::kTogether ? nullptr : &wanted);
              EXPECT_TRUE(
                  std::equal(found.ids.begin(), found.ids.end(), wanted.ids.begin() + first * c.chosen))
                  << "score " << static_cast<int>(spec.score) << ", rows " << first << " and " << tokens;
              EXPECT_TRUE(same_bits(found.weights.read(), wanted.weights.read().slice(first, tokens)))
                  << "score " << static_cast<int>(spec.score) << ", rows " << first << " and " << tokens;
              EXPECT_TRUE(same_bits(found.out.read(), wanted.out.read().slice(first, tokens)))
                  << "score " << static_cast<int>(spec.score) << ", rows " << first << " and " << tokens;
              EXPECT_TRUE(found.weights.gaps_untouched() && found.out.gaps_untouched());
            }
          }
        }
      }
    }
  }
}

// On cuda the shared expert may be done with the routed ones (up to 64 rows, of BF16).
TEST_P(Fused, RoutedAndSharedExperts) {
  using enum MatrixFormat;
  struct Case {
    int64_t width, expert_width, shared_width;
    MatrixFormat format;
    ActivationSpec activation = {};
  };
  const Case cases[] = {
      {96, 64, 40, kBF16},
      {400, 64, 1024, kBF16},
      {4960, 16, 40, kBF16},  // more tasks than multiprocessors
      {144, 64, 2048, kBF16, {.kind = ActivationSpec::kGptOss, .limit = 1.5f, .alpha = 1.702f}},
      {64, 64, 2112, kBF16},
      {160, 96, 208, kNvfp4},
      {96, 64, 72, kF32}};
  constexpr int64_t kExperts = 9, kChosen = 3, kMost = 65;
  for (const Case& c : cases) {
    Random random(9);
    const int64_t width = c.width;
    const Experts experts(random, kExperts, width, c.expert_width);
    const std::unique_ptr<PlacedExperts> placed = ops_->place_experts(experts.weights);
    const TestMatrix down(random, c.format, width, c.shared_width, 0.5f);
    // Aligned, as few rows on cuda want it, and not.
    for (int64_t gap : {0, 1}) {
      const RowsBuffer x = RowsBuffer::random(random, kMost, width, gap),
                       logits = RowsBuffer::random(random, kMost, kExperts),
                       gate = RowsBuffer::random(random, kMost, c.shared_width, gap),
                       up = RowsBuffer::random(random, kMost, c.shared_width, 2 * gap),
                       residual = RowsBuffer::random(random, kMost, width, 1);
      // The sum of rows `first` and on.
      auto run = [&](bool together, bool adds, int64_t first, int64_t rows) {
        const int64_t routed = rows * kChosen;
        RowsBuffer sum(rows, width, 1), unused(rows, width), weights(rows, kChosen), gathered(routed, width),
            expert_gate(routed, c.expert_width), expert_up(routed, c.expert_width),
            expert_down(routed, width), room(rows, c.shared_width, gap), shared_out(rows, width);
        std::vector<int32_t> ids(static_cast<size_t>(routed), -1);
        for (int64_t t = 0; t < rows; ++t) {
          std::copy_n(gate.read().row(first + t), c.shared_width, room.view().row(t));
          if (adds) std::copy_n(residual.read().row(first + t), width, sum.view().row(t));
        }
        const RouteArgs route = {.logits = logits.read().slice(first, rows),
                                 .spec = {.scale = 2.5f},
                                 .ids = {ids.data(), rows, kChosen},
                                 .weights = weights.view()};
        const ExpertFfnArgs ffn = {
            .x = x.read().slice(first, rows),
            .ids = route.ids,
            .weights = route.weights,
            .experts = *placed,
            .activation = c.activation,
            .scratch = {gathered.view(), expert_gate.view(), expert_up.view(), expert_down.view()},
            .out = adds ? unused.view() : sum.view(),
            .add_to = adds ? sum.view() : Rows<float>()};
        if (together) {
          const SharedExpert shared = {room.view(), up.read().slice(first, rows), down.matrix,
                                       shared_out.view()};
          ops_->routed_ffn(route, ffn, &shared);
        } else {
          ops_->route(route);
          ops_->expert_ffn(ffn);
          ops_->activate(c.activation, room.read(), up.read().slice(first, rows), room.view());
          ops_->linear(room.read(), down.matrix, shared_out.view());
          ops_->add(shared_out.read(), sum.view());
        }
        EXPECT_TRUE(sum.gaps_untouched() && room.gaps_untouched());
        return sum;
      };
      for (bool adds : {false, true}) {
        const RowsBuffer wanted = run(false, adds, 0, kMost);
        for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 65}) {
          for (int64_t first : {int64_t{0}, kMost - rows}) {
            EXPECT_TRUE(same_bits(run(true, adds, first, rows).read(), wanted.read().slice(first, rows)))
                << "widths " << width << " and " << c.shared_width << ", rows " << first << " and " << rows
                << ", gap " << gap << ", adds " << adds;
          }
        }
      }
    }
  }
}

INSTANTIATE_ON_ALL_BACKENDS(Fused);

}  // namespace
}  // namespace nibble::testing
