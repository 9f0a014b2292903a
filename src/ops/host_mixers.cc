// Default bodies of recurrent layers, residual streams and small helpers: plain loops over host memory, sums
// in float64, states in float32.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/ops.h"

namespace nibble {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// out = x * rsqrt(sum x^2 + eps) * scale, over K elements.
void normalize(const float* x, int64_t k, float scale, std::vector<float>& out) {
  constexpr double kEps = 1e-6;
  double sum = 0;
  for (int64_t i = 0; i < k; ++i) sum += static_cast<double>(x[i]) * x[i];
  const float factor = static_cast<float>(1 / std::sqrt(sum + kEps)) * scale;
  for (int64_t i = 0; i < k; ++i) out[static_cast<size_t>(i)] = x[i] * factor;
}

}  // namespace

void Ops::do_causal_conv(const CausalConvArgs& args) {
  const int64_t channels = args.x.cols, kept = args.taps - 1;
  for (int64_t t = 0; t < args.rows.count; ++t) {
    float* state = args.state + args.rows.slots_T[t] * kept * channels;
    const float* x = args.x.row(t);
    for (int64_t c = 0; c < channels; ++c) {
      const float* weight = args.weight + c * args.taps;
      const float input = x[c];  // out may be x
      double sum = 0;
      for (int64_t j = 0; j < kept; ++j) sum += static_cast<double>(weight[j]) * state[j * channels + c];
      sum += static_cast<double>(weight[kept]) * input;
      for (int64_t j = 0; j + 1 < kept; ++j) state[j * channels + c] = state[(j + 1) * channels + c];
      state[(kept - 1) * channels + c] = input;
      const auto y = static_cast<float>(sum);
      args.out.row(t)[c] = y * sigmoid(y);
    }
  }
}

void Ops::do_kda(const KdaArgs& args) {
  const int64_t heads = args.beta.cols, k = args.q.cols / heads;
  std::vector<float> q(static_cast<size_t>(k)), key(static_cast<size_t>(k));
  std::vector<double> delta(static_cast<size_t>(k)), out(static_cast<size_t>(k));
  for (int64_t t = 0; t < args.rows.count; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      float* state = args.state + (args.rows.slots_T[t] * heads + h) * k * k;
      normalize(args.q.row(t) + h * k, k, 1 / std::sqrt(static_cast<float>(k)), q);
      normalize(args.k.row(t) + h * k, k, 1, key);
      const float* value = args.v.row(t) + h * k;
      const float beta = sigmoid(args.beta.row(t)[h]), rate = std::exp(args.a_log[h]);
      std::fill(delta.begin(), delta.end(), 0.0);
      for (int64_t i = 0; i < k; ++i) {
        const float u = args.decay.row(t)[h * k + i] + args.dt_bias[h * k + i];
        const float g =
            args.gate_lower_bound ? *args.gate_lower_bound * sigmoid(rate * u) : -rate * softplus(u);
        const float keep = std::exp(g);
        for (int64_t j = 0; j < k; ++j) {
          state[i * k + j] *= keep;
          delta[static_cast<size_t>(j)] +=
              static_cast<double>(state[i * k + j]) * key[static_cast<size_t>(i)];
        }
      }
      for (int64_t j = 0; j < k; ++j)
        delta[static_cast<size_t>(j)] = beta * (value[j] - delta[static_cast<size_t>(j)]);
      std::fill(out.begin(), out.end(), 0.0);
      for (int64_t i = 0; i < k; ++i) {
        for (int64_t j = 0; j < k; ++j) {
          state[i * k + j] += static_cast<float>(key[static_cast<size_t>(i)] * delta[static_cast<size_t>(j)]);
          out[static_cast<size_t>(j)] += static_cast<double>(state[i * k + j]) * q[static_cast<size_t>(i)];
        }
      }
      for (int64_t j = 0; j < k; ++j)
        args.out.row(t)[h * k + j] = static_cast<float>(out[static_cast<size_t>(j)]);
    }
  }
}

void Ops::do_copy(Rows<const float> x, Rows<float> out) {
  for (int64_t t = 0; t < x.rows; ++t) std::copy_n(x.row(t), x.cols, out.row(t));
}

void Ops::do_layer_norm(Rows<const float> x, const float* weight, const float* bias, float eps,
                        Rows<float> out) {
  const auto count = static_cast<double>(x.cols);
  for (int64_t t = 0; t < x.rows; ++t) {
    double sum = 0, square = 0;
    for (int64_t i = 0; i < x.cols; ++i) sum += x.row(t)[i];
    const double mean = sum / count;
    for (int64_t i = 0; i < x.cols; ++i) square += (x.row(t)[i] - mean) * (x.row(t)[i] - mean);
    const double factor = 1 / std::sqrt(square / count + eps);
    for (int64_t i = 0; i < x.cols; ++i) {
      out.row(t)[i] = static_cast<float>((x.row(t)[i] - mean) * factor) * weight[i] + bias[i];
    }
  }
}

void Ops::do_linear_heads(Rows<const float> x, int64_t x_head, std::span<const Matrix> w_H, Rows<float> out,
                          int64_t out_head) {
  for (size_t h = 0; h < w_H.size(); ++h) {
    const auto head = static_cast<int64_t>(h);
    linear({x.data + head * x_head, x.rows, w_H[h].k, x.stride}, w_H[h],
           {out.data + head * out_head, out.rows, w_H[h].n, out.stride});
  }
}

void Ops::do_hyper_weights(const HyperSpec& spec, const float* base, const float* scale, Rows<float> mix) {
  const int64_t s = spec.streams;
  for (int64_t t = 0; t < mix.rows; ++t) {
    float* pre = mix.row(t);
    float* post = pre + s;
    float* comb = post + s;
    for (int64_t i = 0; i < s; ++i) {
      pre[i] = sigmoid(pre[i] * scale[0] + base[i]) + spec.eps;
      post[i] = 2 * sigmoid(post[i] * scale[1] + base[s + i]);
    }
    for (int64_t i = 0; i < s; ++i) {
      float* row = comb + i * s;
      double top = -INFINITY, sum = 0;
      for (int64_t j = 0; j < s; ++j) {
        row[j] = row[j] * scale[2] + base[2 * s + i * s + j];
        top = std::max(top, static_cast<double>(row[j]));
      }
      for (int64_t j = 0; j < s; ++j) sum += std::exp(row[j] - top);
      for (int64_t j = 0; j < s; ++j) row[j] = static_cast<float>(std::exp(row[j] - top) / sum) + spec.eps;
    }
    // Divides each row (step s, stride 1) or column (step 1, stride s) by its sum.
    auto divide = [&](int64_t step, int64_t stride) {
      for (int64_t i = 0; i < s; ++i) {
        float sum = spec.eps;
        for (int64_t j = 0; j < s; ++j) sum += comb[i * step + j * stride];
        for (int64_t j = 0; j < s; ++j) comb[i * step + j * stride] /= sum;
      }
    };
    divide(1, s);
    for (int64_t i = 1; i < spec.sinkhorn_iterations; ++i) {
      divide(s, 1);
      divide(1, s);
    }
  }
}

void Ops::do_hyper_collect(const HyperSpec& spec, Rows<const float> streams, Rows<const float> mix,
                           Rows<float> out) {
  for (int64_t t = 0; t < out.rows; ++t) {
    for (int64_t d = 0; d < out.cols; ++d) {
      double sum = 0;
      for (int64_t i = 0; i < spec.streams; ++i)
        sum += static_cast<double>(mix.row(t)[i]) * streams.row(t)[i * out.cols + d];
      out.row(t)[d] = static_cast<float>(sum);
    }
  }
}

void Ops::do_hyper_distribute(const HyperSpec& spec, Rows<const float> y, Rows<const float> mix,
                              Rows<float> streams) {
  const int64_t s = spec.streams;
  std::vector<float> before(static_cast<size_t>(s));
  for (int64_t t = 0; t < y.rows; ++t) {
    const float* post = mix.row(t) + s;
    const float* comb = post + s;
    for (int64_t d = 0; d < y.cols; ++d) {
      for (int64_t j = 0; j < s; ++j) before[static_cast<size_t>(j)] = streams.row(t)[j * y.cols + d];
      for (int64_t i = 0; i < s; ++i) {
        double sum = static_cast<double>(post[i]) * y.row(t)[d];
        for (int64_t j = 0; j < s; ++j)
          sum += static_cast<double>(comb[j * s + i]) * before[static_cast<size_t>(j)];
        streams.row(t)[i * y.cols + d] = static_cast<float>(sum);
      }
    }
  }
}

void Ops::do_hyper_mean(const HyperSpec& spec, Rows<const float> streams, Rows<float> out) {
  for (int64_t t = 0; t < out.rows; ++t) {
    for (int64_t d = 0; d < out.cols; ++d) {
      double sum = 0;
      for (int64_t i = 0; i < spec.streams; ++i) sum += streams.row(t)[i * out.cols + d];
      out.row(t)[d] = static_cast<float>(sum / static_cast<double>(spec.streams));
    }
  }
}

}  // namespace nibble
