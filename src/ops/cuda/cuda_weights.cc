#include "ops/cuda/cuda_weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "base/numbers.h"
#include "ops/cuda/errors.h"
#include "ops/cuda/gguf_split.h"
#include "ops/cuda/moe_formats.h"
#include "ops/cuda/tile_linear.h"

namespace nibble::cuda {
namespace {

constexpr int64_t kAlign = 256;  // of a matrix's codes and scales; a memory transaction and more

// Which formats some matrices have: a launch does those of one.
std::vector<MatrixFormat> formats_of(const std::vector<DeviceMatrix>& matrices) {
  std::vector<MatrixFormat> formats;
  for (const DeviceMatrix& m : matrices) {
    if (std::find(formats.begin(), formats.end(), m.format) == formats.end()) formats.push_back(m.format);
  }
  return formats;
}

}  // namespace

CudaWeights::CudaWeights(Memory& memory, cudaStream_t stream, Device device, std::string tensor_cores,
                         MoePaths paths)
    : memory_(memory),
      stream_(stream),
      device_(std::move(device)),
      tensor_cores_(std::move(tensor_cores)),
      paths_(std::move(paths)),
      why_no_tiles_(why_no_tiles(device_)) {}

Result<Matrix> CudaWeights::place(const Matrix& host_matrix, MatrixUse use) {
  Matrix placed = host_matrix;
  if (tensor_cores_ == "off" || use == MatrixUse::kEmbedding || !can_be_tiles(host_matrix)) {
    NIBBLE_RETURN_IF_ERROR(place_all({&placed}));
    return placed;
  }
  NIBBLE_RETURN_IF_ERROR(upload_all({&placed}, staging_, true));
  // The kernel that joins the shared expert's last product to the routed ones takes plain BF16.
  placed.in_12_bits = placed.format == MatrixFormat::kBF16 && use != MatrixUse::kSharedDown;
  NIBBLE_ASSIGN_OR_RETURN(Buffer tiles, make_tiles_of(placed));
  placed.codes = tiles.as<uint8_t>();
  placed.scales = nullptr;
  placed.tiled = true;
  weights_.push_back(std::move(tiles));
  return placed;
}

Result<Buffer> CudaWeights::make_tiles_of(Matrix& uploaded) {
  const TileKind kind = tile_kind(uploaded);
  NIBBLE_ASSIGN_OR_RETURN(Buffer tiles,
                          Buffer::allocate(memory_, tile_bytes(kind, uploaded.n, uploaded.k), "weights"));
  if (does_not_fit_.bytes() == 0) {
    NIBBLE_ASSIGN_OR_RETURN(does_not_fit_, Buffer::allocate(memory_, sizeof(int), "weights"));
  }
  int does_not_fit = 0;
  memory_.upload(does_not_fit_.as<void>(), &does_not_fit, sizeof(int));
  check(make_tiles(kind, uploaded, tiles.as<uint8_t>(), does_not_fit_.as<int>(), stream_), "weights: tiles");
  // This also waits for the tiles: tile_linear reads them before it waits for the kernel before it.
  memory_.download(&does_not_fit, does_not_fit_.as<void>(), sizeof(int));
  if (does_not_fit == 0) return tiles;
  uploaded.in_12_bits = false;
  tiles = Buffer();
  return make_tiles_of(uploaded);
}

Result<std::unique_ptr<PlacedExperts>> CudaWeights::place_experts(std::span<const ExpertWeights> host_experts,
                                                                  ExpertsOf whose) {
  if (tensor_cores_ != "off" && paths_.path != "portable") {
    const std::string why = why_not_packed(host_experts, device_, paths_);
    if (why.empty()) {
      if (whose == ExpertsOf::kModel && paths_.path == "auto" && !paths_.has_wgmma &&
          !std::exchange(warned_of_path_, true))
        log_warning("routed experts of many rows take the slower kernel for few: no wgmma here");
      return place_packed(host_experts);
    }
    if (whose == ExpertsOf::kModel) {
      if (paths_.path != "auto")
        return user_error("moe-path {}: not for these routed experts: {}; take auto", paths_.path, why);
      if (tensor_cores_ == "on")
        return user_error("tensor-cores on: routed experts cannot be on them: {}", why);
      warn("routed experts", why, warned_of_experts_);
    }
  }
  std::vector<ExpertWeights> experts(host_experts.begin(), host_experts.end());
  std::vector<Matrix*> matrices;
  for (ExpertWeights& e : experts) matrices.insert(matrices.end(), {&e.gate, &e.up, &e.down});
  NIBBLE_RETURN_IF_ERROR(place_all(matrices));
  auto placed = std::make_unique<CudaExperts>(std::move(experts));
  auto table = [&](Matrix ExpertWeights::*matrix, const float* ExpertWeights::*bias,
                   float ExpertWeights::*input_scale) {
    std::vector<DeviceMatrix> of_expert;
    for (const ExpertWeights& e : placed->experts())
      of_expert.push_back(device_matrix(e.*matrix, e.*bias, e.*input_scale));
    return make_table(of_expert);
  };
  using W = ExpertWeights;
  NIBBLE_ASSIGN_OR_RETURN(placed->gate, table(&W::gate, &W::gate_bias, &W::input_scale));
  NIBBLE_ASSIGN_OR_RETURN(placed->up, table(&W::up, &W::up_bias, &W::input_scale));
  NIBBLE_ASSIGN_OR_RETURN(placed->down, table(&W::down, &W::down_bias, &W::down_input_scale));
  const int64_t bytes = (placed->count() + 1) * static_cast<int64_t>(sizeof(int32_t));
  NIBBLE_ASSIGN_OR_RETURN(placed->begin, Buffer::allocate(memory_, bytes, "expert groups"));
  NIBBLE_ASSIGN_OR_RETURN(placed->active, Buffer::allocate(memory_, bytes, "expert groups"));
  return std::unique_ptr<PlacedExperts>(std::move(placed));
}

bool CudaWeights::can_be_tiles(const Matrix& host_matrix) {
  if (!has_tiles(host_matrix.format)) return false;
  const std::string why = why_no_tiles_.empty() ? why_not_tiles(host_matrix) : why_no_tiles_;
  if (!why.empty())
    warn(fmt::format("weights in {}", matrix_format_name(host_matrix.format)), why, warned_of_matrices_);
  return why.empty();
}

void CudaWeights::warn(const std::string& what, const std::string& why, bool& warned) {
  if (!std::exchange(warned, true))
    log_warning("{} run without tensor cores, in float32, the slower the more rows a step has: {}", what,
                why);
}

// All experts of a layer in the order of moe_decode.cu. What is on the host goes through a buffer for one
// expert.
Result<std::unique_ptr<PlacedExperts>> CudaWeights::place_packed(
    std::span<const ExpertWeights> host_experts) {
  MoeShape shape{.experts = static_cast<int>(host_experts.size()),
                 .model = static_cast<int>(host_experts[0].gate.k),
                 .width = static_cast<int>(host_experts[0].gate.n),
                 .kind = tile_kind(host_experts[0].gate)};
  const int64_t each = shape.gate_up_bytes() + shape.down_bytes();
  NIBBLE_ASSIGN_OR_RETURN(Buffer packed, Buffer::allocate(memory_, each * shape.experts, "experts"));
  std::vector<ExpertWeights> experts(host_experts.begin(), host_experts.end());
  std::vector<PackedExpert> table;
  for (size_t e = 0; e < experts.size(); ++e) {
    ExpertWeights& w = experts[e];
    uint8_t* at = packed.as<uint8_t>() + static_cast<int64_t>(e) * each;
    table.push_back({.gate_up = at,
                     .down = at + shape.gate_up_bytes(),
                     .gate_scale = w.gate.tensor_scale,
                     .up_scale = w.up.tensor_scale,
                     .down_scale = w.down.tensor_scale,
                     .gate_bias = w.gate_bias,
                     .up_bias = w.up_bias,
                     .down_bias = w.down_bias});
    NIBBLE_RETURN_IF_ERROR(upload_all({&w.gate, &w.up, &w.down}, staging_, true));
    auto disk = [](const Matrix& m) {
      return DiskMatrix{static_cast<const uint8_t*>(m.codes), static_cast<const uint8_t*>(m.scales)};
    };
    uint8_t* down_at = at + shape.gate_up_bytes();
    check(repack_gate_up(shape, disk(w.gate), disk(w.up), at, stream_), "experts: repacking");
    check(repack_down(shape, disk(w.down), down_at, stream_), "experts: repacking");
    for (Matrix* m : {&w.gate, &w.up, &w.down}) m->codes = m->scales = nullptr;
  }
  weights_.push_back(std::move(packed));
  auto placed = std::make_unique<CudaExperts>(std::move(experts));
  placed->tensor = shape;
  const auto bytes = static_cast<int64_t>(table.size() * sizeof(PackedExpert));
  NIBBLE_ASSIGN_OR_RETURN(placed->packed_table, Buffer::allocate(memory_, bytes, "table of experts"));
  memory_.upload(placed->packed_table.as<void>(), table.data(), bytes);
  return std::unique_ptr<PlacedExperts>(std::move(placed));
}

// Brings the host bytes of matrices to the device, in one allocation that lives as long as the backend.
Status CudaWeights::place_all(const std::vector<Matrix*>& matrices) {
  Buffer buffer;
  NIBBLE_RETURN_IF_ERROR(upload_all(matrices, buffer, false));
  weights_.push_back(std::move(buffer));
  return {};
}

// The same, into `buffer`, which is allocated anew if it is too small. For tiles GGUF blocks are split, too.
Status CudaWeights::upload_all(const std::vector<Matrix*>& matrices, Buffer& buffer, bool for_tiles) {
  auto code_bytes = [](const Matrix& m) { return matrix_code_bytes(m.format, m.n, m.k); };
  auto scale_bytes = [](const Matrix& m) { return matrix_scale_bytes(m.format, m.n, m.k); };
  auto splits = [&](const Matrix& m) { return for_tiles && can_split(m.format); };
  int64_t bytes = 0;
  for (const Matrix* m : matrices)
    bytes += round_up(code_bytes(*m), kAlign) * (splits(*m) ? 2 : 1) + round_up(scale_bytes(*m), kAlign);
  if (bytes > buffer.bytes()) {
    buffer = Buffer();
    NIBBLE_ASSIGN_OR_RETURN(buffer, Buffer::allocate(memory_, bytes, "weights"));
  }
  auto* next = buffer.as<uint8_t>();
  auto upload = [&](const void*& data, int64_t size) {
    memory_.upload(next, data, size);
    data = next;
    next += round_up(size, kAlign);
  };
  for (Matrix* m : matrices) {
    upload(m->codes, code_bytes(*m));
    if (scale_bytes(*m) > 0) upload(m->scales, scale_bytes(*m));
    if (!splits(*m)) continue;
    const int64_t room = round_up(code_bytes(*m), kAlign);
    check(split_gguf(*m, next, stream_), "weights: GGUF blocks");
    next += room;
  }
  return {};
}

Result<MatrixTable> CudaWeights::make_table(const std::vector<DeviceMatrix>& matrices) {
  const auto bytes = static_cast<int64_t>(matrices.size() * sizeof(DeviceMatrix));
  MatrixTable table;
  NIBBLE_ASSIGN_OR_RETURN(table.device, Buffer::allocate(memory_, bytes, "table of weights"));
  memory_.upload(table.device.as<void>(), matrices.data(), bytes);
  table.formats = formats_of(matrices);
  return table;
}

}  // namespace nibble::cuda
