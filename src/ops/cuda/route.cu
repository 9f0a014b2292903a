#include "ops/cuda/errors.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/route_row.cuh"

namespace nibble::cuda {
namespace {

__global__ void __launch_bounds__(kRouteThreads) route_kernel(RouteArgs args) {
  extern __shared__ __align__(16) uint32_t s_keys[];
  __shared__ float s_warps[kRouteThreads / kWarp];
  const float bias = own_bias(args);
  after_kernel_before();
  route_row(args, blockIdx.x, bias, s_keys, s_warps, [](int, int) {});
}

}  // namespace

void route(cudaStream_t stream, const RouteArgs& args) {
  if (args.ids.rows == 0) return;
  const int bytes = route_shared_bytes(args);
  constexpr int kBytesWithoutAsking = 48 << 10;
  if (bytes > kBytesWithoutAsking)
    check(cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "route");
  launch_early(route_kernel, static_cast<unsigned>(args.ids.rows), kRouteThreads, static_cast<size_t>(bytes),
               stream, args);
  check_launch("route", args.ids.rows, args.logits.cols, args.ids.cols);
}

}  // namespace nibble::cuda
