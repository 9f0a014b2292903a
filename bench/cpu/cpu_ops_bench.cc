// The cpu backend's operations other than products with 4-bit weights: attention over long contexts, delta
// attention, residual streams, BF16 products, norms; beside what this machine reads in the same run.
//
//   cpu_ops_bench [--json] [threads] [isa] [part of a row's name] [exact|int8]
//
// The best of many calls: the machine may be shared. With one thread in CPU time, which other people's work
// does not count in; with more in wall time. Each call finds its keys, states and weights cold where they are
// larger than the caches; bytes are what a call has to read and write of them once. --json: one object
// instead of a table.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ops/backend.h"

namespace nibble {
namespace {

class Bench {
 public:
  Bench(bool json, int threads, const std::string& isa, std::string filter, const std::string& activations)
      : is_json_(json),
        threads_(threads),
        filter_(std::move(filter)),
        ops_(make_backend("cpu", {.threads = threads, .cpu_isa = isa, .cpu_activations = activations})
                 .value()) {
    ceiling_ = ops_->read_bandwidth().value();
    if (is_json_) return;
    fmt::print("{}, read ceiling {:.1f} GB/s\n", ops_->description(), ceiling_ / 1e9);
    fmt::print("| operation | us | GB/s | of ceiling | GFLOP/s |\n|---|---:|---:|---:|---:|\n");
  }

  Ops& ops() { return *ops_; }
  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  template <class Call>
  void row(const std::string& name, double bytes, double operations, Call call) {
    if (!wants(name)) return;
    call();
    double best = 1e9, spent = 0;
    for (int i = 0; i < 5 || (spent < 0.5 && i < 2000); ++i) {
      const double start = seconds();
      call();
      const double took = seconds() - start;
      best = std::min(best, took);
      spent += took;
    }
    if (is_json_) {
      rows_.push_back({{"name", name},
                       {"bytes", bytes},
                       {"operations", operations},
                       {"least_seconds", best},
                       {"bytes_per_second", bytes / best},
                       {"share_of_read_ceiling", bytes / best / ceiling_},
                       {"flop_per_second", operations / best}});
      return;
    }
    fmt::print("| {} | {:.1f} | {:.1f} | {:.0f}% | {:.1f} |\n", name, best * 1e6, bytes / best / 1e9,
               100 * bytes / best / ceiling_, operations / best / 1e9);
    std::fflush(stdout);
  }

  // The object, if it was asked for.
  void finish() const {
    if (!is_json_) return;
    const nlohmann::ordered_json json = {
        {"device", ops_->description()}, {"read_ceiling_bytes_per_second", ceiling_}, {"rows", rows_}};
    std::cout << json.dump(2) << "\n";
  }

 private:
  double seconds() const {
    if (threads_ == 1) {
      timespec now{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
      return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  bool is_json_;
  nlohmann::ordered_json rows_ = nlohmann::ordered_json::array();
  int threads_;
  std::string filter_;
  std::unique_ptr<Ops> ops_;
  double ceiling_ = 0;
};

std::vector<float> random_floats(int64_t count) {
  static std::minstd_rand random(1);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = static_cast<float>(random()) / 1.1e9f - 1;
  return out;
}

// One layer's cache of `sequences` sequences with `positions` each.
struct Cache {
  static constexpr int64_t kPageTokens = 16;
  std::vector<float> keys, values;
  std::vector<int32_t> table, positions_T, slots_T;
  KvView view;

  Cache(int64_t sequences, int64_t positions, int64_t kv_heads, int64_t head_dim, int64_t value_dim) {
    const int64_t pages = (positions + kPageTokens - 1) / kPageTokens,
                  tokens = sequences * pages * kPageTokens;
    keys = random_floats(tokens * kv_heads * head_dim);
    values = random_floats(tokens * kv_heads * value_dim);
    for (int64_t i = 0; i < sequences * pages; ++i) table.push_back(static_cast<int32_t>(i));
    std::shuffle(table.begin(), table.end(), std::minstd_rand(2));
    view = {keys.data(), values.data(), kv_heads, head_dim, kPageTokens, pages, table.data(), value_dim};
  }
  // `rows` last positions of each sequence.
  RowsOfStep rows(int64_t sequences, int64_t rows_each, int64_t positions) {
    positions_T.clear(), slots_T.clear();
    for (int64_t s = 0; s < sequences; ++s) {
      for (int64_t i = 0; i < rows_each; ++i) {
        positions_T.push_back(static_cast<int32_t>(positions - rows_each + i));
        slots_T.push_back(static_cast<int32_t>(s));
      }
    }
    return {sequences * rows_each, positions_T.data(), slots_T.data()};
  }
};

void attention(Bench& bench, const std::string& what, int64_t heads, int64_t kv_heads, int64_t head_dim,
               int64_t value_dim, int64_t positions, int64_t rows_each) {
  const std::string name = fmt::format("attend {}, {} positions, {} rows", what, positions, rows_each);
  if (!bench.wants(name)) return;
  Cache cache(1, positions, kv_heads, head_dim, value_dim);
  const RowsOfStep rows = cache.rows(1, rows_each, positions);
  const std::vector<float> q = random_floats(rows.count * heads * head_dim);
  std::vector<float> out(static_cast<size_t>(rows.count * heads * value_dim));
  const double per_position = static_cast<double>(kv_heads * (head_dim + value_dim) * 4);
  bench.row(name, per_position * static_cast<double>(positions),
            2.0 * static_cast<double>(rows.count * heads * (head_dim + value_dim) * positions), [&] {
              bench.ops().attend({.q = {q.data(), rows.count, heads * head_dim},
                                  .kv = cache.view,
                                  .rows = rows,
                                  .scale = 0.1f,
                                  .out = {out.data(), rows.count, heads * value_dim}});
            });
}

void sparse_attention(Bench& bench, int64_t positions) {
  constexpr int64_t kHeads = 64, kRank = 512, kIndexHeads = 32, kIndexDim = 128, kPool = 4, kTopK = 2048;
  const std::string chooses = fmt::format("index_select, {} positions", positions);
  const std::string attends = fmt::format("attend_selected, 64 heads, 2048 of {} positions", positions);
  if (!bench.wants(chooses) && !bench.wants(attends)) return;
  Cache cache(1, positions, 1, kRank, kRank), index(1, positions, 1, kIndexDim, kIndexDim);
  const RowsOfStep rows = cache.rows(1, 1, positions);
  const std::vector<float> q = random_floats(kHeads * kRank),
                           index_q = random_floats(kIndexHeads * kIndexDim);
  const std::vector<float> weights = random_floats(kIndexHeads), ape = random_floats(kPool * kIndexDim);
  std::vector<float> out(kHeads * kRank);
  std::vector<int32_t> selected(kTopK + kPool);
  int32_t count = 0;
  const Selection selection = {{selected.data(), 1, kTopK + kPool}, &count};
  auto choose = [&] {
    bench.ops().index_select({.q = {index_q.data(), 1, kIndexHeads * kIndexDim},
                              .weights = {weights.data(), 1, kIndexHeads},
                              .kv = index.view,
                              .ape = ape.data(),
                              .pool = kPool,
                              .top_k = kTopK,
                              .rows = rows,
                              .out = selection});
  };
  choose();
  bench.row(chooses, 2.0 * kIndexDim * 4 * static_cast<double>(positions),
            2.0 * kIndexHeads * kIndexDim * static_cast<double>(positions) / kPool, choose);
  bench.row(attends, 2.0 * kRank * 4 * count, 4.0 * kHeads * kRank * count, [&] {
    bench.ops().attend_selected({.q = {q.data(), 1, kHeads * kRank},
                                 .kv = cache.view,
                                 .rows = rows,
                                 .scale = 0.1f,
                                 .out = {out.data(), 1, kHeads * kRank}},
                                selection);
  });
}

void recurrent(Bench& bench, int64_t sequences) {
  constexpr int64_t kHeads = 64, kDim = 128, kWidth = kHeads * kDim, kTaps = 4;
  std::vector<int32_t> positions(static_cast<size_t>(sequences), 5), slots;
  for (int64_t s = 0; s < sequences; ++s) slots.push_back(static_cast<int32_t>(s));
  const RowsOfStep rows = {sequences, positions.data(), slots.data()};
  const std::vector<float> q = random_floats(sequences * kWidth), beta = random_floats(sequences * kHeads);
  const std::vector<float> dt_bias = random_floats(kWidth), a_log = random_floats(kHeads);
  const std::vector<float> weight = random_floats(kWidth * kTaps);
  std::vector<float> state = random_floats(sequences * kWidth * kDim);
  std::vector<float> conv_state = random_floats(sequences * kWidth * (kTaps - 1));
  std::vector<float> out(static_cast<size_t>(sequences * kWidth));
  const Rows<const float> in = {q.data(), sequences, kWidth};
  bench.row(fmt::format("kda, 64 heads x 128, {} sequences", sequences),
            2.0 * 4 * static_cast<double>(sequences * kWidth * kDim),
            7.0 * static_cast<double>(sequences * kWidth * kDim), [&] {
              bench.ops().kda({.q = in,
                               .k = in,
                               .v = in,
                               .decay = in,
                               .beta = {beta.data(), sequences, kHeads},
                               .dt_bias = dt_bias.data(),
                               .a_log = a_log.data(),
                               .gate_lower_bound = -5.0f,
                               .state = state.data(),
                               .rows = rows,
                               .out = {out.data(), sequences, kWidth}});
            });
  bench.row(fmt::format("causal_conv, 8192 channels, {} sequences", sequences),
            4.0 * static_cast<double>(sequences * kWidth * (2 * (kTaps - 1) + 2)), 0, [&] {
              bench.ops().causal_conv(
                  {in, weight.data(), kTaps, conv_state.data(), rows, {out.data(), sequences, kWidth}});
            });
}

void small_operations(Bench& bench, int64_t rows) {
  constexpr int64_t kWidth = 4096;
  const HyperSpec spec = {.streams = 4, .sinkhorn_iterations = 20, .eps = 1e-6f};
  std::vector<float> streams = random_floats(rows * 4 * kWidth), y = random_floats(rows * kWidth);
  std::vector<float> mix = random_floats(rows * spec.mix_width()), ones(4 * kWidth, 1.0f);
  const std::vector<float> base = random_floats(spec.mix_width()), scale = random_floats(3);
  const Rows<float> s = {streams.data(), rows, 4 * kWidth}, x = {y.data(), rows, kWidth};
  const Rows<float> m = {mix.data(), rows, spec.mix_width()};
  auto name = [&](const char* what) { return fmt::format("{}, {} rows", what, rows); };
  auto bytes = [&](int64_t floats) { return 4.0 * static_cast<double>(rows * floats); };
  bench.row(name("hyper_collect 4 x 4096"), bytes(5 * kWidth), 0,
            [&] { bench.ops().hyper_collect(spec, s, m, x); });
  bench.row(name("hyper_distribute 4 x 4096"), bytes(9 * kWidth), 0, [&] {
    std::fill(mix.begin(), mix.end(), 0.2f);  // or the streams would grow from call to call
    bench.ops().hyper_distribute(spec, x, m, s);
  });
  bench.row(name("hyper_mean 4 x 4096"), bytes(5 * kWidth), 0, [&] { bench.ops().hyper_mean(spec, s, x); });
  bench.row(name("hyper_weights 4 streams"), bytes(2 * spec.mix_width()), 0,
            [&] { bench.ops().hyper_weights(spec, base.data(), scale.data(), m); });
  bench.row(name("rms_norm 4096"), bytes(2 * kWidth), 0,
            [&] { bench.ops().rms_norm(x, ones.data(), 1e-5f, x); });
  bench.row(name("layer_norm 128"), bytes(2 * 128), 0, [&] {
    const Rows<float> key = {y.data(), rows, 128, kWidth};
    bench.ops().layer_norm(key, ones.data(), ones.data(), 1e-6f, key);
  });
  bench.row(name("add 4096"), bytes(3 * kWidth), 0, [&] { bench.ops().add({s.data, rows, kWidth}, x); });
  std::vector<float> logits = random_floats(rows * 256), chosen(static_cast<size_t>(rows * 8));
  std::vector<int32_t> ids(static_cast<size_t>(rows * 8));
  bench.row(name("route 8 of 256"), bytes(256), 0, [&] {
    bench.ops().route({.logits = {logits.data(), rows, 256},
                       .bias_E = ones.data(),
                       .spec = {},
                       .ids = {ids.data(), rows, 8},
                       .weights = {chosen.data(), rows, 8}});
  });
}

// Normal numbers, as weights are about, in huge pages, as the backend has them.
Buffer bf16_weights(int64_t count) {
  std::vector<uint16_t> codes(size_t{1} << 22);
  std::minstd_rand random(2);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  for (uint16_t& code : codes) code = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
  Buffer weights = Buffer::allocate(host_memory(), count * 2, "weights").value();
  use_huge_pages(weights);
  for (int64_t at = 0; at < count; at += std::ssize(codes))
    std::copy_n(codes.data(), std::min(std::ssize(codes), count - at), weights.as<uint16_t>() + at);
  return weights;
}

// As the file has them, and as place() makes them; bytes are those of 16 bits for both.
void bf16_products(Bench& bench, int64_t kK) {
  const int64_t kN = (int64_t{1} << 27) / kK;  // 256 MB, beyond the caches
  std::optional<Buffer> weights;
  std::vector<Matrix> plain, placed;
  for (int64_t rows : {1, 2, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64, 256}) {
    const int64_t n = rows <= 16 ? 4096 : 1024;
    const std::string name = fmt::format("bf16 {} x {}, {} rows", n, kK, rows);
    if (!bench.wants(name)) continue;
    if (!weights) weights = bf16_weights(kN * kK);
    if (plain.empty() || plain[0].n != n) {
      plain.clear(), placed.clear();
      for (int64_t first = 0; first < kN; first += n) {
        Matrix w{.format = MatrixFormat::kBF16, .n = n, .k = kK};
        w.codes = weights->as<uint16_t>() + first * kK;
        plain.push_back(w);
        placed.push_back(bench.ops().place(w).value());
      }
    }
    const std::vector<float> x = random_floats(rows * kK);
    std::vector<float> out(static_cast<size_t>(rows * n));
    for (const std::vector<Matrix>* matrices : {&plain, &placed}) {
      size_t turn = 0;
      bench.row(name + (matrices == &placed ? ", placed" : ""), 2.0 * static_cast<double>(n * kK),
                2.0 * static_cast<double>(rows * n * kK), [&] {
                  bench.ops().linear({x.data(), rows, kK}, (*matrices)[turn++ % matrices->size()],
                                     {out.data(), rows, n});
                });
    }
  }
}

void run(Bench& bench) {
  for (int64_t k : {4096, 2048}) bf16_products(bench, k);
  for (int64_t positions : {512, 4096, 32768})
    attention(bench, "GQA 64/8 x 128", 64, 8, 128, 128, positions, 1);
  attention(bench, "GQA 64/8 x 128", 64, 8, 128, 128, 4096, 16);
  for (int64_t positions : {512, 4096, 32768})
    attention(bench, "MLA 128 x 576/512", 128, 1, 576, 512, positions, 1);
  for (int64_t positions : {4096, 32768}) sparse_attention(bench, positions);
  for (int64_t sequences : {1, 8}) recurrent(bench, sequences);
  for (int64_t rows : {1, 8}) small_operations(bench, rows);
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::string_view(argv[1]) == "--json";
  if (json) ++argv, --argc;
  nibble::Bench bench(json, argc > 1 ? std::atoi(argv[1]) : 1, argc > 2 ? argv[2] : "",
                      argc > 3 ? argv[3] : "", argc > 4 ? argv[4] : "exact");
  nibble::run(bench);
  bench.finish();
}
