// Any bytes as a GGUF file: no crash, no hang, no large allocation, only errors of one line, and the same
// outcome whether the file is mapped or read; where it is good, every tensor, every value in every way that a
// reader may ask, the tokenizer that it describes, and the model: its spec, its text parts and its weights.
#include <cstdint>
#include <limits>
#include <string>

#include "base/check.h"
#include "base/faulty_file.h"
#include "base/log.h"
#include "checkpoint/gguf.h"
#include "engine/gguf_tokenizer.h"
#include "engine/model_source.h"
#include "model/weights.h"
#include "ops/backend.h"

namespace nibble {
namespace {

constexpr int64_t kLow = std::numeric_limits<int64_t>::min(), kHigh = std::numeric_limits<int64_t>::max();

void expect_sane(const Status& status) {
  NIBBLE_CHECK(status.ok() || status.code() == ErrorCode::kUser);
  NIBBLE_CHECK(status.message().find('\n') == std::string::npos);
}

void ask(const GgufMetadata& metadata) {
  for (const auto& [key, value] : metadata.values()) {
    NIBBLE_CHECK(describe(value).find('\n') == std::string::npos);
    expect_sane(metadata.integer(key, kLow, kHigh).status());
    expect_sane(metadata.number(key).status());
    expect_sane(metadata.boolean(key).status());
    expect_sane(metadata.text(key).status());
    expect_sane(metadata.integers(key, 0, 100).status());
    expect_sane(metadata.numbers(key).status());
    expect_sane(metadata.booleans(key).status());
    expect_sane(metadata.texts(key).status());
    expect_sane(metadata.integer_each(key, 3, kLow, kHigh).status());
  }
}

void tokenize(const GgufMetadata& metadata, const std::string& text) {
  Result<Tokenizer> tokenizer = load_gguf_tokenizer(metadata);
  expect_sane(tokenizer.status());
  if (!tokenizer.ok()) return;
  for (bool parse_special : {true, false}) {
    Result<std::vector<int32_t>> ids = tokenizer->encode(text, {.parse_special = parse_special});
    expect_sane(ids.status());
    if (!ids.ok()) continue;
    for (int32_t id : *ids) NIBBLE_CHECK(id >= 0 && id < tokenizer->vocab_size());
    (void)tokenizer->decode(*ids, parse_special);
  }
}

// As `nibble inspect` takes it apart.
void open_model(const FileSystem& files) {
  const Result<std::unique_ptr<ModelSource>> source = ModelSource::open(files, "m.gguf");
  NIBBLE_CHECK(source.ok());
  expect_sane((*source)->chat().status());
  expect_sane((*source)->generation(0).status());
  const Result<ModelSpec> spec = (*source)->spec();
  expect_sane(spec.status());
  if (!spec.ok()) return;
  const std::unique_ptr<WeightSource> weights = (*source)->weights(*spec, [](MatrixFormat) { return false; }).value();
  (void)weights->stored();
  const std::unique_ptr<Ops> ops = make_backend("reference", {.threads = 1}).value();
  expect_sane(load_weights(*spec, *weights, *ops).status());
}

Status load(const FileSystem& files, const std::string& text) {
  Result<Gguf> gguf = Gguf::open(files, "m.gguf");
  expect_sane(gguf.status());
  if (!gguf.ok()) return gguf.status();
  int64_t data_bytes = 0;
  for (const GgufTensorInfo* tensor : gguf->tensors()) {
    data_bytes += tensor->bytes;
    Result<GgufTensorView> view = gguf->tensor(tensor->name, tensor->shape);
    NIBBLE_CHECK(view.ok() == tensor->type->readable);
    if (!view.ok()) continue;
    NIBBLE_CHECK(std::ssize(view->bytes) == tensor->bytes);
    NIBBLE_CHECK(reinterpret_cast<uintptr_t>(view->bytes.data()) % 8 == 0);
    expect_sane(gguf->floats(tensor->name, tensor->shape).status());
  }
  NIBBLE_CHECK(data_bytes == gguf->total_bytes());
  ask(gguf->metadata());
  tokenize(gguf->metadata(), text);
  open_model(files);
  return {};
}

}  // namespace
}  // namespace nibble

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nibble;
  set_log_level(LogLevel::kError);
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  FaultyFileSystem files;
  files.add_file("m.gguf", bytes);
  const Status mapped = load(files, bytes);
  files.refuse_map("m.gguf");
  NIBBLE_CHECK(load(files, bytes).message() == mapped.message());
  return 0;
}
