// nibble quantize: a BF16, F16 or F32 model directory to a 4-bit one.
#include "checkpoint/quantize.h"

#include "base/log.h"
#include "base/numbers.h"
#include "base/thread_pool.h"
#include "commands.h"
#include "progress.h"

namespace nibble {
namespace {

// The flag's value, of those that nibble.cc lets through.
QuantizeType type_of(const std::string& name) {
  for (QuantizeType type : {QuantizeType::kNvfp4, QuantizeType::kMxfp4}) {
    if (name == quantize_type_name(type)) return type;
  }
  return QuantizeType::kQ4;
}

}  // namespace

Status quantize_command(const QuantizeCommandOptions& options) {
  ProgressLine line("quantize");
  line.plain_every(std::chrono::seconds(30));
  const QuantizeOptions job = {.source = options.source,
                               .destination = options.destination,
                               .type = type_of(options.type),
                               .what = options.what == quantize_what_name(QuantizeWhat::kAllLinear)
                                           ? QuantizeWhat::kAllLinear
                                           : QuantizeWhat::kExperts,
                               .threads = options.threads == 0 ? usable_cpus() : options.threads,
                               .max_shard_bytes = static_cast<int64_t>(options.max_shard_bytes),
                               .version = NIBBLE_VERSION,
                               .progress = [&](const JobProgress& progress) {
                                 line.update(progress.done_bytes, progress.total_bytes, progress.found_bytes);
                               }};
  const Result<QuantizeSummary> done = quantize_model(FileSystem::posix(), job);
  if (!done.ok()) {
    line.clear();
    return done.status();
  }
  line.finish(done->source_bytes);
  log_info(
      "{}: {} tensors in {}, {} in all, {} file{}{}", options.destination, done->tensors, options.type,
      format_bytes(done->output_bytes), done->shards, done->shards == 1 ? "" : "s",
      done->resumed_shards == 0 ? "" : fmt::format(", {} of them from an earlier run", done->resumed_shards));
  if (done->kept > 0)
    log_warning("{} tensors stay as they were: their columns do not divide into groups", done->kept);
  return {};
}

}  // namespace nibble
