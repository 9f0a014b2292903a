#include "ops/cuda/device.h"

#include <fmt/format.h>

#include "base/numbers.h"
#include "ops/cuda/kernels.h"

namespace nibble::cuda {
namespace {

std::string version(int number) { return fmt::format("{}.{}", number / 1000, number % 1000 / 10); }

}  // namespace

std::string Device::describe() const {
  return fmt::format(
      "{}, compute capability {}.{}, kernels for {}.{}, {} multiprocessors, {} of {} free, driver for CUDA "
      "{}, runtime {}",
      name, major, minor, compiled_for / 10, compiled_for % 10, multiprocessors, format_bytes(free_bytes),
      format_bytes(total_bytes), version(driver_version), version(runtime_version));
}

Result<Device> find_device() {
  auto none = [](cudaError_t error) {
    return user_error("no CUDA device: {}; --device cpu needs none", cudaGetErrorString(error));
  };
  int count = 0;
  if (cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) return none(error);
  if (count == 0) return none(cudaErrorNoDevice);
  Device device;
  int index = 0;
  cudaDeviceProp properties;
  size_t free_bytes = 0, total_bytes = 0;
  for (cudaError_t error :
       {cudaGetDevice(&index), cudaGetDeviceProperties(&properties, index),
        cudaMemGetInfo(&free_bytes, &total_bytes), cudaDriverGetVersion(&device.driver_version),
        cudaRuntimeGetVersion(&device.runtime_version)}) {
    if (error != cudaSuccess) return none(error);
  }
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  device.free_bytes = static_cast<int64_t>(free_bytes);
  device.total_bytes = static_cast<int64_t>(total_bytes);
  if (device.major < 8)
    return user_error("CUDA device {}: compute capability {}.{}; wanted 8.0 or later", device.name,
                      device.major, device.minor);
  if (cudaError_t error = find_kernels(device.compiled_for); error != cudaSuccess) {
    return user_error(
        "CUDA device {}: this build has no kernels for compute capability {}.{} ({}); build with "
        "-DCMAKE_CUDA_ARCHITECTURES={}{}{}",
        device.name, device.major, device.minor, cudaGetErrorString(error), device.major, device.minor,
        device.major * 10 >= kHopper ? "a-real" : "");
  }
  return device;
}

}  // namespace nibble::cuda
