// nibble convert: a GGUF file or a compressed-tensors directory to ModelOpt's layout.
#include "base/log.h"
#include "base/numbers.h"
#include "base/thread_pool.h"
#include "commands.h"
#include "engine/model_source.h"
#include "model_path.h"
#include "progress.h"

namespace nibble {

Status convert_command(const ConvertCommandOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, find_model(options.source));
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source,
                          ModelSource::open(FileSystem::posix(), path));
  ProgressLine line("convert");
  line.plain_every(std::chrono::seconds(30));
  const Result<ConvertSummary> done =
      source->convert({.source = path,
                       .destination = options.destination,
                       .threads = options.threads == 0 ? usable_cpus() : options.threads,
                       .max_shard_bytes = static_cast<int64_t>(options.max_shard_bytes),
                       .version = NIBBLE_VERSION,
                       .progress =
                           [&](const JobProgress& progress) {
                             line.update(progress.done_bytes, progress.total_bytes, progress.found_bytes);
                           },
                       .requantize = options.type == "nvfp4"});
  if (!done.ok()) {
    line.clear();
    return done.status();
  }
  line.finish(done->source_bytes);
  log_info(
      "{}: {} 4-bit matrices with their bits, {} made NVFP4, {} in all, {} file{}{}", options.destination,
      done->kept, done->requantized, format_bytes(done->output_bytes), done->shards,
      done->shards == 1 ? "" : "s",
      done->resumed_shards == 0 ? "" : fmt::format(", {} of them from an earlier run", done->resumed_shards));
  if (done->decoded > 0) {
    log_warning("{} matrices are now BF16: their blocks have no equivalent{}", done->decoded,
                options.type.empty() ? " (--type nvfp4 quantizes linear layers anew)" : "");
  }
  return {};
}

}  // namespace nibble
