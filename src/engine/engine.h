// The engine: a loaded model and the requests that run on it.
//
// One thread owns an Engine: submit, cancel and step are not safe for concurrent use.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/result.h"
#include "engine/chat_format.h"
#include "engine/generation_config.h"
#include "engine/model_source.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "model/loaded_model.h"
#include "ops/backend.h"
#include "text/tokenizer.h"

namespace nibble {

struct EngineOptions {
  std::string model;           // see ModelSource::open
  std::string device = "cpu";  // one of backend_names()
  BackendOptions backend;
  int64_t context = 0;   // tokens of one sequence; 0: the model's own, at most kDefaultContext
  int64_t parallel = 1;  // sequences that run at once
  int64_t prefill_chunk = kDefaultPrefillChunk;  // prompt tokens of one sequence in a step
  std::string chat_template;                     // a file to take instead of the model's own template
  ExpertArithmetic arithmetic = {};

  static constexpr int64_t kDefaultContext = 8192;  // float32 KV of more is a surprise on a small machine
};

enum class FinishReason { kNone, kStop, kLength, kContext };

struct Request {
  std::vector<int32_t> prompt;  // at least one token
  SamplingParams sampling;
  std::optional<int64_t> max_tokens;  // absent: until the model ends or the context is full
  bool ignore_eos = false;
};

struct TokenEvent {
  Scheduler::Id id = 0;
  int32_t token = 0;
  // Set on the last event of a request. With kStop `token` is an end-of-sequence token and no text.
  FinishReason finish = FinishReason::kNone;
};

class Engine {
 public:
  // Loads and checks everything, and tests the backend against the reference before anyone relies on it.
  static Result<std::unique_ptr<Engine>> load(const FileSystem& files, const EngineOptions& options,
                                              const LoadProgress& progress = {});

  // Queues a request. An empty or too long prompt, an id outside the vocabulary, or a bad sampling value is
  // an error here, never later.
  Result<Scheduler::Id> submit(Request request);
  // The request is gone; its memory is free for the next step. Unknown ids are ignored.
  void cancel(Scheduler::Id id);
  // Runs one step over all running requests; the new tokens, at most one a request. Nothing to do: empty.
  Result<std::vector<TokenEvent>> step();
  bool idle() const { return requests_.empty(); }

  const Tokenizer& tokenizer() const { return *tokenizer_; }
  const ChatFormat& chat() const { return *chat_; }
  Decoder& decoder() { return *model_.decoder; }
  const EngineOptions& options() const { return options_; }  // with the defaults filled in
  // What the model's makers ask for, over the built-in defaults.
  const SamplingParams& default_sampling() const { return default_sampling_; }
  bool is_end(int32_t token) const;
  int64_t weight_bytes_per_token() const { return weight_bytes_per_token_; }
  int64_t checkpoint_bytes() const { return model_.weights->total_bytes(); }

 private:
  struct Running {
    Request request;
    std::vector<int32_t> tokens;  // prompt and generated
    Sampler sampler;
    int32_t slot = -1;  // in the KV cache, once admitted
  };
  Engine() = default;
  // Steps, and the next token of each of `choosing`, whose rows of logits are in that order.
  Result<std::vector<int32_t>> next_tokens(std::span<const SequenceStep> steps,
                                           std::span<Running* const> choosing);
  TokenEvent take_token(Scheduler::Id id, Running& running, int32_t token);
  void finish(Scheduler::Id id);

  EngineOptions options_;
  LoadedModel model_;
  std::optional<Tokenizer> tokenizer_;
  std::optional<ChatFormat> chat_;
  SamplingParams default_sampling_;
  std::vector<int32_t> end_tokens_;
  int64_t weight_bytes_per_token_ = 0;

  std::unique_ptr<Scheduler> scheduler_;
  std::map<Scheduler::Id, Running> requests_;
  Scheduler::Id next_id_ = 1;
};

}  // namespace nibble
