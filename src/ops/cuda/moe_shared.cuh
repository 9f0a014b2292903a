// The last product of the shared expert, by moe_layer: its weights are on their way while the kernel waits
// for the rows to be grouped, and no launch stands between it and the sum that it is added to.
#pragma once

#include "ops/cuda/linear_tiles.cuh"
#include "ops/cuda/moe_layer.cuh"

namespace nibble::cuda {

// A task is 32 weight rows; the order of sums is that of linear_tiles.cuh. A warp that multiplies has two
// ranges of K.
class SharedProducts {
  static constexpr int kRangesOfWarp = kRanges / kWarps;
  static constexpr int kChunk = Tiles<TileKind::kBF16>::kBytes, kColumns = Tiles<TileKind::kBF16>::kColumns;
  static constexpr int kRowsOfPass = 8, kValues = 8;  // values of a lane, range and pass
  static constexpr int kPassBytes = kRanges * kValues * 32 * 4;
  static constexpr int kPasses = 4;  // between barriers

 public:
  static constexpr int kSharedBytes = kPasses * kPassBytes;

  // By all threads of a block. Asks for the first weights.
  __device__ explicit SharedProducts(const MoeDecodeArgs& a)
      : a_(a),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        chunks_((a.shared.width + kColumns - 1) / kColumns),
        tasks_(a.shared.tiles != nullptr ? (a.shape.model + kTaskRows - 1) / kTaskRows : 0) {
    if (warp_ >= kWarps || static_cast<int>(blockIdx.x) >= tasks_) return;
#pragma unroll
    for (int r = 0; r < kRangesOfWarp; ++r) {
      if (begin(r) < begin(r + 1)) hold(r, static_cast<int>(blockIdx.x) * chunks_ + begin(r));
    }
  }

  // Once gate is activated; with kSharedBytes.
  __device__ void run(const Handed& handed, float* shared) {
    for (int task = static_cast<int>(blockIdx.x); task < tasks_; task += static_cast<int>(gridDim.x)) {
      for (int first = 0; first < a_.tokens; first += kPasses * kRowsOfPass) {
        if (warp_ < kWarps) multiply(task, first, shared);
        __syncthreads();
        finish(handed, task, first, shared);
        __syncthreads();
      }
    }
  }

 private:
  // Of this warp's range r, or the end of the one before.
  __device__ int begin(int r) const { return range_begin(warp_ * kRangesOfWarp + r, chunks_); }

  // A chunk of all tasks, in range r's registers: the operands of load_tile(), which are 32 words beside each
  // other in every block of 8 rows and 16 bytes.
  __device__ void hold(int r, int chunk) {
    if (held_[r] == chunk) return;
    held_[r] = chunk;
    const auto* from = reinterpret_cast<const uint32_t*>(a_.shared.tiles + int64_t{chunk} * kChunk) + lane_;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weights_[r][tile][step][i] = __ldcs(from + (tile * 2 + i % 2) * (kBF16HalfBytes / 4) +
                                              step * (kBF16StepBytes / 4) + i / 2 * 32);
        }
      }
    }
  }

  __device__ void multiply(int task, int first_row, float* to) {
    const SharedDown& s = a_.shared;
    const bool whole = s.width % kColumns == 0 && s.gate_stride % 4 == 0 && is_aligned(s.gate);
    const int column = step_column<TileKind::kBF16>(lane_ % 4, 0, 0);
    const int last_row = min(first_row + kPasses * kRowsOfPass, a_.tokens);
    to += warp_ * kRangesOfWarp * kValues * 32 + lane_;
#pragma unroll 1
    for (; first_row < last_row; first_row += kRowsOfPass, to += kPassBytes / 4) {
      const int row = first_row + lane_ / 4;
      const float* x = row < a_.tokens ? s.gate + row * s.gate_stride : nullptr;
#pragma unroll
      for (int r = 0; r < kRangesOfWarp; ++r) {
        float sums[2][4] = {};
        for (int chunk = begin(r); chunk < begin(r + 1); ++chunk) {
          hold(r, task * chunks_ + chunk);
          uint32_t high[8], low[8];
          split_piece(load_piece<TileKind::kBF16>(x, chunk * kColumns + column, s.width, whole), high, low);
#pragma unroll
          for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int part = 0; part < 2; ++part) {
              const uint32_t(&b)[8] = part == 0 ? high : low;
#pragma unroll
              for (int tile = 0; tile < 2; ++tile) {
                const uint32_t(&w)[4] = weights_[r][tile][step];
                mma_bf16(sums[tile], w[0], w[1], w[2], w[3], b[2 * step], b[2 * step + 1]);
              }
            }
          }
        }
#pragma unroll
        for (int v = 0; v < kValues; ++v) to[(r * kValues + v) * 32] = sums[v / 4][v % 4];
      }
    }
  }

  __device__ void finish(const Handed& handed, int task, int first_row, const float* from) const {
    const int rows = min(a_.tokens - first_row, kPasses * kRowsOfPass), d = a_.shape.model_chunks() * 128;
    for (int id = static_cast<int>(threadIdx.x); id < rows * kTaskRows; id += kThreads) {
      const int r = id % kTaskRows, row = id / kTaskRows, token = row % kRowsOfPass;
      const int v = r / 8 * 2 + token % 2, from_lane = r % 8 * 4 + token / 2;
      const float* at = from + (row / kRowsOfPass * kRanges * kValues + v) * 32 + from_lane;
      const float sum = sum_of_ranges(at, kValues * 32);
      if (task * kTaskRows + r >= a_.shape.model) continue;  // nobody would take it
      hand(handed.shared + int64_t{first_row + row} * d + task * kTaskRows + r,
           __float_as_uint(scaled<TileKind::kBF16>(sum, a_.shared.scale)));
    }
  }

  const MoeDecodeArgs& a_;
  const int warp_, lane_, chunks_, tasks_;
  int held_[kRangesOfWarp] = {-1, -1};
  uint32_t weights_[kRangesOfWarp][2][4][4];
};

// The products of a token and four columns, asked for at first; their places are zero again afterwards.
class TakeShared {
 public:
  __device__ TakeShared(const MoeDecodeArgs& a, const Handed& handed, int64_t t, int column)
      : count_(a.shared.tiles == nullptr ? 0 : max(min(a.shape.model - column, 4), 0)),
        at_(handed.shared + t * a.shape.model_chunks() * 128 + column) {
    ask();
  }
  __device__ void add_to(float (&sums)[4]) {
    while (missing()) ask();
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      if (v < count_) sums[v] += __uint_as_float(~words_[v]), at_[v] = 0;
    }
  }

 private:
  __device__ void ask() {
#pragma unroll
    for (int v = 0; v < 4; ++v) words_[v] = v < count_ ? load_relaxed(at_ + v) : 1;
  }
  __device__ bool missing() const {
    return words_[0] == 0 || words_[1] == 0 || words_[2] == 0 || words_[3] == 0;
  }

  const int count_;
  uint32_t* const at_;
  uint32_t words_[4];
};

}  // namespace nibble::cuda
