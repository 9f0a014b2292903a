// That every backend can say how fast it reads; the figure is for nobody to test.
#include <cmath>

#include "ops/backends.h"

namespace nibble::testing {
namespace {

class ReadBandwidth : public OnEveryBackend {};
INSTANTIATE_ON_ALL_BACKENDS(ReadBandwidth);

TEST_P(ReadBandwidth, IsANumber) {
  const double bytes_per_second = ops_->ops().read_bandwidth().value();
  EXPECT_TRUE(std::isfinite(bytes_per_second));
  EXPECT_GT(bytes_per_second, 0);
}

}  // namespace
}  // namespace nibble::testing
