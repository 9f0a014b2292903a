#include "ops/cpu/attention.h"

#include <algorithm>
#include <cmath>

#include "ops/limits.h"
#include "ops/mixer_args.h"

namespace nibble::cpu {
namespace {

// Long enough that joining costs nothing, short enough that the keys and values of a piece and a head stay in
// a core's cache for the rows of a step that follow one another.
constexpr int64_t kPiecePositions = 512;

class Attention {
 public:
  Attention(const Kernels& kernels, const AttendArgs& args, const Selection* selection)
      : kernels_(kernels),
        args_(args),
        selection_(selection),
        heads_(args.q.cols / args.kv.head_dim),
        group_(heads_ / args.kv.kv_heads),
        parts_(ceil_div(group_, kAttendHeads)),
        width_(args.kv.value_width()),
        stride_(round_up(width_, kLanes)) {
    NIBBLE_CHECK(args.kv.head_dim <= kMaxHeadDim && width_ <= kMaxHeadDim);
  }

  void run(ThreadPool& pool, Scratch& scratch) {
    const int64_t rows = args_.q.rows;
    if (rows == 0) return;
    int64_t begin = INT64_MAX, end = 0, seen = 0;
    for (int64_t t = 0; t < rows; ++t) {
      begin = std::min(begin, first(t) / kPiecePositions);
      end = std::max(end, last(t) / kPiecePositions + 1);
      seen = std::max(seen, last(t) - first(t) + 1);
    }
    // So many pieces at a time that all threads have work: one, where there are many rows and heads.
    const int64_t tasks = rows * args_.kv.kv_heads * parts_;
    const int64_t wave = std::min(end - begin, ceil_div(int64_t{4} * pool.threads(), tasks));
    const int64_t states = rows * heads_ * 2, piece = heads_ * head_floats();
    states_ = scratch.reserve(states + (wave > 1 ? wave * rows * piece : 0));
    float* pieces = states_ + states;
    const int64_t heads = ceil_div(group_, parts_);
    // A core does about 50 products in a ns.
    const int64_t task_ns = std::min(seen, kPiecePositions) * heads * (args_.kv.head_dim + width_) / 50 + 100;
    for (int64_t p = begin; p < end; p += wave) {
      const int64_t count = std::min(wave, end - p);
      // Neighbours are rows of the step, which may share their keys.
      for_each(pool, count * tasks, task_ns, [&](int64_t i) {
        const Part part = part_of(i % tasks);
        if (wave > 1) {
          return attend(part, p + i / tasks,
                        pieces + (i / tasks * rows + part.t) * piece + part.head * head_floats());
        }
        alignas(64) float own[kAttendHeads * (kMaxHeadDim + 2)];
        attend(part, p, own);
        join(part, p, own);
      });
      if (wave == 1) continue;
      for_each(pool, tasks, count * heads * width_ / 8, [&](int64_t i) {
        const Part part = part_of(i);
        for (int64_t w = 0; w < count; ++w) {
          join(part, p + w, pieces + (w * rows + part.t) * piece + part.head * head_floats());
        }
      });
    }
  }

 private:
  // Up to kAttendHeads heads of row t that share a key/value head.
  struct Part {
    int64_t t, kv_head, head, count;
  };
  Part part_of(int64_t i) const {
    const int64_t t = i % args_.q.rows, g = i / args_.q.rows / parts_, part = i / args_.q.rows % parts_;
    const int64_t head = group_ * part / parts_, next = group_ * (part + 1) / parts_;
    return {t, g, g * group_ + head, next - head};
  }

  // The positions of a row, or places in its selection.
  int64_t last(int64_t t) const {
    return selection_ != nullptr ? selection_->counts[t] - 1 : args_.rows.positions_T[t];
  }
  int64_t first(int64_t t) const {
    if (selection_ != nullptr || args_.window == 0) return 0;
    return std::max<int64_t>(0, last(t) - args_.window + 1);
  }
  bool sees(int64_t t, int64_t piece) const {
    return first(t) / kPiecePositions <= piece && piece <= last(t) / kPiecePositions;
  }

  // What a piece leaves of a head: its values, top and total. Those of a part: all values, all tops, all
  // totals.
  int64_t head_floats() const { return stride_ + 2; }

  void attend(const Part& part, int64_t piece, float* out) const {
    if (!sees(part.t, piece)) return;
    const KvView& kv = args_.kv;
    float* tops = out + part.count * stride_;
    kernels_.attend({.q = args_.q.row(part.t) + part.head * kv.head_dim,
                     .heads = part.count,
                     .keys = kv.keys,
                     .values = kv.values,
                     .table = kv.table + args_.rows.slots_T[part.t] * kv.table_pages,
                     .table_pages = kv.table_pages,
                     .page_tokens = kv.page_tokens,
                     .kv_heads = kv.kv_heads,
                     .head_dim = kv.head_dim,
                     .value_dim = width_,
                     .kv_head = part.kv_head,
                     .positions = selection_ != nullptr ? selection_->positions.row(part.t) : nullptr,
                     .first = std::max(first(part.t), piece * kPiecePositions),
                     .last = std::min(last(part.t), (piece + 1) * kPiecePositions - 1),
                     .scale = args_.scale,
                     .top = tops,
                     .total = tops + part.count,
                     .out = out,
                     .out_stride = stride_});
  }

  void join(const Part& part, int64_t piece, const float* from) const {
    if (!sees(part.t, piece)) return;
    for (int64_t i = 0; i < part.count; ++i) {
      const int64_t h = part.head + i;
      const float* values = from + i * stride_;
      const float top = from[part.count * stride_ + i], total = from[part.count * (stride_ + 1) + i];
      float* out = args_.out.row(part.t) + h * width_;
      float* state = states_ + (part.t * heads_ + h) * 2;
      bool joins = piece != first(part.t) / kPiecePositions;
      if (!joins && args_.sinks_H != nullptr && args_.sinks_H[h] != -INFINITY) {
        std::fill_n(out, width_, 0.0f);
        state[0] = args_.sinks_H[h], state[1] = 1;
        joins = true;
      }
      if (joins) {
        kernels_.attend_join(values, top, total, width_, out, &state[0], &state[1]);
      } else {
        std::copy_n(values, width_, out);
        state[0] = top, state[1] = total;
      }
      if (piece == last(part.t) / kPiecePositions) kernels_.attend_finish(state[1], width_, out);
    }
  }

  const Kernels& kernels_;
  const AttendArgs& args_;
  const Selection* selection_;
  const int64_t heads_, group_, parts_;
  const int64_t width_, stride_;
  float* states_ = nullptr;  // [T, H, 2]: top and total of what is joined in out
};

}  // namespace

void attend_rows(ThreadPool& pool, const Kernels& kernels, const AttendArgs& args, const Selection* selection,
                 Scratch& scratch) {
  Attention(kernels, args, selection).run(pool, scratch);
}

}  // namespace nibble::cpu
