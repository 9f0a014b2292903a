// How fast are the cpu backend's 4-bit products, beside what this machine's memory and arithmetic could do?
//
//   expert_bench [--threads N] [--isa NAME] [--activations exact|int8] [--gib G] [--json]
//
// Ceilings: reading 1 GiB (host_read_bandwidth()), and FMA in registers (AVX-512 machines), by 1 to N
// threads; with N again between the formats, since others may use the machine. Then, for each format and
// number of rows, one product [R, 4096] x [2048, 4096]^T and one layer of routed experts (8 of E chosen by
// each row, model 4096, expert width 2048; spec moe.md 6, shape S, with as many experts as fit in G GiB).
// Weights are cold: a product walks through the experts, and a layer's are drawn anew for each call. Of the
// repetitions of a call: the least and the median of wall time, and the least of the process's CPU time over
// N, which is what a call without waiting for memory takes where the cores are not ours alone. Bytes are
// those of codes and scales, each expert that is hit once; operations are two for a weight and a row. --json:
// one object instead of lines.
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "base/thread_pool.h"
#include "ops/backend.h"
#include "ops/host_read_bandwidth.h"

namespace nibble {
namespace {

constexpr int64_t kModel = 4096, kWidth = 2048, kChosen = 8;

struct Options {
  int threads = usable_cores();
  std::string isa, activations = "exact";
  double gib = 4;
  bool json = false;
};

struct Time {
  double least_s, median_s;  // wall time
  double cpu_s;              // mean, of all threads
};
double cpu_time_s() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}
// Calls work(i) until it took `enough_s`, at least 5 times.
template <class Work>
Time time_of(double enough_s, const Work& work) {
  std::vector<double> times;
  double total = 0;
  const double cpu_start = cpu_time_s();
  for (int64_t i = 0; times.size() < 5 || total < enough_s; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work(i);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    total += times.back();
  }
  const double cpu = (cpu_time_s() - cpu_start) / static_cast<double>(times.size());
  std::sort(times.begin(), times.end());
  return {times.front(), times[times.size() / 2], cpu};
}

#if defined(__x86_64__)
// Twelve independent chains of 512-bit FMA.
__attribute__((target("avx512f"))) float fma_chains(int64_t steps) {
  using Vec = float __attribute__((vector_size(64)));
  Vec a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{}, i{}, j{}, k{}, l{};
  const Vec factor = Vec{} + 0.999f;
  for (int64_t step = 0; step < steps; ++step) {
    for (Vec* sum : {&a, &b, &c, &d, &e, &f, &g, &h, &i, &j, &k, &l})
      __asm__ volatile("vfmadd213ps %1, %1, %0" : "+v"(*sum) : "v"(factor));
  }
  const Vec all = a + b + c + d + e + f + g + h + i + j + k + l;
  return all[0];
}

double fma_rate(ThreadPool& pool) {
  constexpr int64_t kSteps = 200'000;
  if (!__builtin_cpu_supports("avx512f")) return 0;
  const Time time = time_of(0.5, [&](int64_t) {
    pool.parallel_for(pool.threads(), [&](int64_t) { NIBBLE_CHECK(fma_chains(kSteps) > 0); });
  });
  return 2.0 * 16 * 12 * kSteps * pool.threads() / time.least_s;
}
#else
double fma_rate(ThreadPool& /*pool*/) { return 0; }
#endif

// Random codes under scales of about one.
struct HostMatrix {
  std::vector<uint8_t> codes, scales;
  Matrix matrix;

  HostMatrix(std::mt19937_64& random, MatrixFormat format, int64_t n, int64_t k) {
    matrix = {.format = format, .n = n, .k = k, .tensor_scale = 0.01f};
    codes.resize(static_cast<size_t>(matrix_code_bytes(format, n, k)));
    scales.resize(static_cast<size_t>(matrix_scale_bytes(format, n, k)));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    for (size_t i = 0; i < scales.size(); ++i) {
      const auto few = static_cast<uint8_t>(random() % 8);
      scales[i] = format == MatrixFormat::kNvfp4   ? static_cast<uint8_t>(0x34 + few)
                  : format == MatrixFormat::kMxfp4 ? static_cast<uint8_t>(124 + few)
                  : i % 2 == 0                     ? few
                                                   : static_cast<uint8_t>(0x38);
    }
    matrix.codes = codes.data();
    matrix.scales = scales.data();
  }
};

// Of all threads.
struct Ceilings {
  double read = 0, fma = 0;
  void measure(ThreadPool& pool) {
    read = std::max(read, host_read_bandwidth(pool).value());
    fma = std::max(fma, fma_rate(pool));
  }
};

// One line of the result, once the ceilings are known.
struct Line {
  std::string what;
  int64_t rows;
  double bytes, operations;
  Time time;
};

void print(const Line& line, const Ceilings& ceilings, int threads) {
  const auto& [what, rows, bytes, operations, time] = line;
  const double read = bytes / time.least_s;
  auto print_rate = [&](std::string_view clock, double seconds) {
    fmt::print("  {} {:>6.1f} GFLOP/s", clock, operations / seconds * 1e-9);
    if (ceilings.fma > 0) fmt::print(" {:>3.0f}%", 100 * operations / seconds / ceilings.fma);
  };
  fmt::print("{:<16} {:>3} rows {:>8.3f} ms (median {:>8.3f}) {:>5.1f} GB/s {:>3.0f}%", what, rows,
             time.least_s * 1e3, time.median_s * 1e3, read * 1e-9, 100 * read / ceilings.read);
  print_rate("wall", time.least_s);
  print_rate("CPU", time.cpu_s / threads);
  fmt::print("\n");
}

nlohmann::ordered_json json_of(const Ceilings& ceilings, int threads) {
  return {
      {"threads", threads}, {"read_bytes_per_second", ceilings.read}, {"fma_flop_per_second", ceilings.fma}};
}
nlohmann::ordered_json json_of(const Line& line, const Ceilings& ceilings) {
  const double rate = line.bytes / line.time.least_s;
  return {{"name", line.what},
          {"rows", line.rows},
          {"bytes", line.bytes},
          {"operations", line.operations},
          {"least_seconds", line.time.least_s},
          {"median_seconds", line.time.median_s},
          {"cpu_seconds", line.time.cpu_s},
          {"bytes_per_second", rate},
          {"share_of_read_ceiling", rate / ceilings.read},
          {"flop_per_second", line.operations / line.time.least_s}};
}

class Bench {
 public:
  Bench(const Options& options, Ops& ops, std::vector<Line>& lines)
      : options_(options), ops_(ops), lines_(lines) {}

  void run(MatrixFormat format) {
    const std::string name(matrix_format_name(format));
    // Random bytes take longer than all else: the experts hold a few matrices again and again, each placed in
    // memory of its own.
    std::vector<HostMatrix> up, down;
    for (int i = 0; i < 4; ++i) {
      up.emplace_back(random_, format, kWidth, kModel);
      down.emplace_back(random_, format, kModel, kWidth);
    }
    const int64_t expert_bytes = 3 * matrix_bytes(format, kWidth, kModel);
    const auto experts = static_cast<size_t>(options_.gib * 0x1p30 / static_cast<double>(expert_bytes));
    std::vector<ExpertWeights> host(experts);
    for (size_t e = 0; e < experts; ++e)
      host[e] = {up[e % 4].matrix, up[(e + 1) % 4].matrix, down[e % 4].matrix};
    const std::unique_ptr<PlacedExperts> placed = ops_.place_experts(host).value();
    for (int64_t rows : {1, 2, 4, 8, 32, 256}) {
      const std::vector<float> x = floats(rows * kModel);
      std::vector<float> out(static_cast<size_t>(rows * kModel));
      const Time time = time_of(1, [&](int64_t i) {
        const ExpertWeights& w = placed->experts()[static_cast<size_t>(i * 7) % experts];
        ops_.linear({x.data(), rows, kModel}, w.gate, {out.data(), rows, kWidth});
      });
      const double weights = static_cast<double>(kWidth * kModel);
      lines_.push_back({"linear " + name, rows, static_cast<double>(matrix_bytes(format, kWidth, kModel)),
                        2 * weights * static_cast<double>(rows), time});
    }
    for (int64_t rows : {1, 8, 32, 256}) layer(name, format, *placed, rows);
  }

 private:
  void layer(const std::string& name, MatrixFormat format, const PlacedExperts& experts, int64_t rows) {
    const int64_t routed = rows * kChosen;
    const std::vector<float> x = floats(rows * kModel), weights = floats(routed);
    std::vector<float> out(x.size()), gathered(static_cast<size_t>(routed * kModel)), down(gathered.size()),
        gate(static_cast<size_t>(routed * kWidth)), up(gate.size());
    std::vector<int32_t> ids(static_cast<size_t>(routed)), all(static_cast<size_t>(experts.count()));
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
    double hit = 0, calls = 0;
    const Time time = time_of(rows > 32 ? 4 : 2, [&](int64_t) {
      std::vector<bool> seen(all.size());
      for (int64_t r = 0; r < rows; ++r) {
        for (size_t a = 0; a < kChosen; ++a) {
          std::swap(all[a], all[a + random_() % (all.size() - a)]);
          ids[static_cast<size_t>(r) * kChosen + a] = all[a];
          hit += seen[static_cast<size_t>(all[a])] ? 0 : 1;
          seen[static_cast<size_t>(all[a])] = true;
        }
      }
      calls += 1;
      ops_.expert_ffn({.x = {x.data(), rows, kModel},
                       .ids = {ids.data(), rows, kChosen},
                       .weights = {weights.data(), rows, kChosen},
                       .experts = experts,
                       .scratch = {.gathered = {gathered.data(), routed, kModel},
                                   .gate = {gate.data(), routed, kWidth},
                                   .up = {up.data(), routed, kWidth},
                                   .down = {down.data(), routed, kModel}},
                       .out = {out.data(), rows, kModel}});
    });
    const double weights_each = 3.0 * kWidth * kModel;
    lines_.push_back({fmt::format("layer {} E{}", name, experts.count()), rows,
                      hit / calls * 3 * static_cast<double>(matrix_bytes(format, kWidth, kModel)),
                      2 * weights_each * static_cast<double>(routed), time});
  }

  std::vector<float> floats(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<float> out(static_cast<size_t>(n));
    for (float& v : out) v = normal(random_);
    return out;
  }

  const Options& options_;
  Ops& ops_;
  std::vector<Line>& lines_;
  std::mt19937_64 random_{1};
};

int run(const Options& options) {
  nlohmann::ordered_json ceilings_of_fewer = nlohmann::ordered_json::array();
  for (int threads = 1; threads < options.threads; ++threads) {
    ThreadPool pool(threads);
    Ceilings ceilings;
    ceilings.measure(pool);
    ceilings_of_fewer.push_back(json_of(ceilings, threads));
    if (options.json) continue;
    fmt::print("ceilings, {} threads: read {:.1f} GB/s, FMA {:.1f} GFLOP/s\n", threads, ceilings.read * 1e-9,
               ceilings.fma * 1e-9);
  }
  // Others may use the machine: what all threads can do is measured again between the formats.
  Ceilings ceilings;
  ThreadPool pool(options.threads);
  ceilings.measure(pool);
  std::vector<Line> lines;
  std::string device;
  for (MatrixFormat format : {MatrixFormat::kNvfp4, MatrixFormat::kMxfp4, MatrixFormat::kQ4}) {
    BackendOptions backend;
    backend.threads = options.threads;
    backend.cpu_isa = options.isa;
    backend.cpu_activations = options.activations;
    const std::unique_ptr<Ops> ops = make_backend("cpu", backend).value();
    device = ops->description();
    Bench(options, *ops, lines).run(format);
    ceilings.measure(pool);
  }
  if (options.json) {
    nlohmann::ordered_json json = {{"device", device},
                                   {"ceilings", json_of(ceilings, options.threads)},
                                   {"ceilings_of_fewer_threads", ceilings_of_fewer},
                                   {"rows", nlohmann::ordered_json::array()}};
    for (const Line& line : lines) json["rows"].push_back(json_of(line, ceilings));
    std::cout << json.dump(2) << "\n";
    return 0;
  }
  fmt::print("ceilings, {} threads: read {:.1f} GB/s, FMA {:.1f} GFLOP/s\n{}\n", options.threads,
             ceilings.read * 1e-9, ceilings.fma * 1e-9, device);
  for (const Line& line : lines) print(line, ceilings, options.threads);
  return 0;
}

}  // namespace
}  // namespace nibble

int main(int argc, char** argv) {
  nibble::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--json") options.json = true;
    if (flag == "--json" || i + 1 == argc) continue;
    ++i;
    if (flag == "--threads") options.threads = std::max(1, std::atoi(argv[i]));
    if (flag == "--isa") options.isa = argv[i];
    if (flag == "--activations") options.activations = argv[i];
    if (flag == "--gib") options.gib = std::atof(argv[i]);
  }
  return nibble::run(options);
}
