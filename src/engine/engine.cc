#include "engine/engine.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/log.h"
#include "ops/self_test.h"

namespace nibble {

Result<std::unique_ptr<Engine>> Engine::load(const FileSystem& files, const EngineOptions& asked,
                                             const LoadProgress& progress) {
  auto engine = std::unique_ptr<Engine>(new Engine());
  engine->options_ = asked;
  EngineOptions& options = engine->options_;
  if (options.context < 0 || options.parallel < 1 || options.parallel > 1024 || options.prefill_chunk < 1 ||
      options.prefill_chunk > (1 << 20)) {
    return user_error(
        "wanted a context of at least 0, 1 to 1024 parallel sequences and a prefill chunk of 1 to 1048576; "
        "found {}, {} and {}",
        options.context, options.parallel, options.prefill_chunk);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source, ModelSource::open(files, options.model));
  NIBBLE_ASSIGN_OR_RETURN(ModelSpec spec, source->spec());
  if (options.context == 0) options.context = std::min(spec.max_positions, EngineOptions::kDefaultContext);
  if (options.context > spec.max_positions) {
    log_warning("a context of {} is beyond the {} positions that the model was made for", options.context,
                spec.max_positions);
  }
  if (!spec.ignored_config_keys.empty()) {
    log_warning("{}: keys that this version does not know: {}", options.model,
                fmt::join(spec.ignored_config_keys, ", "));
  }
  // The small files first: what is wrong with them shows before gigabytes are read.
  NIBBLE_ASSIGN_OR_RETURN(engine->tokenizer_, source->tokenizer());
  NIBBLE_ASSIGN_OR_RETURN(engine->chat_, source->chat(options.chat_template));
  NIBBLE_ASSIGN_OR_RETURN(GenerationConfig generation, source->generation(spec.vocab));
  engine->default_sampling_ = generation.sampling;
  engine->end_tokens_ = spec.eos;
  engine->end_tokens_.insert(engine->end_tokens_.end(), generation.end_tokens.begin(),
                             generation.end_tokens.end());
  if (engine->tokenizer_->vocab_size() > spec.vocab) {
    return user_error("{}: the tokenizer has {} tokens, the model only {}", options.model,
                      engine->tokenizer_->vocab_size(), spec.vocab);
  }

  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<Ops> ops, make_backend(options.device, options.backend));
  NIBBLE_RETURN_IF_ERROR(self_test(*ops));
  options.prefill_chunk = std::min(options.prefill_chunk, options.context);  // no prompt is longer
  const int64_t rows = options.parallel + options.prefill_chunk;
  NIBBLE_ASSIGN_OR_RETURN(std::unique_ptr<WeightSource> weights, source->weights(spec, formats_copied(*ops)));
  NIBBLE_ASSIGN_OR_RETURN(engine->model_, load_model(std::move(weights), std::move(spec), std::move(ops),
                                                     {.kv = {.max_sequences = options.parallel,
                                                             .max_tokens = options.context,
                                                             .max_new_tokens = options.prefill_chunk},
                                                      .max_rows = rows,
                                                      .max_logit_rows = options.parallel,
                                                      .arithmetic = options.arithmetic},
                                                     progress));
  engine->weight_bytes_per_token_ =
      nibble::weight_bytes_per_token(engine->decoder().spec(), engine->decoder().weights());
  engine->scheduler_ = std::make_unique<Scheduler>(SchedulerOptions{
      .max_sequences = options.parallel, .max_rows = rows, .prefill_chunk = options.prefill_chunk});
  return engine;
}

bool Engine::is_end(int32_t token) const {
  return std::find(end_tokens_.begin(), end_tokens_.end(), token) != end_tokens_.end();
}

Result<Scheduler::Id> Engine::submit(Request request) {
  NIBBLE_RETURN_IF_ERROR(request.sampling.check());
  if (request.max_tokens && *request.max_tokens < 1)
    return user_error("max_tokens: wanted at least 1, found {}", *request.max_tokens);
  if (request.prompt.empty()) return user_error("the prompt is empty; wanted at least one token");
  const int64_t tokens = static_cast<int64_t>(request.prompt.size());
  if (tokens >= options_.context) {
    return user_error("the prompt has {} tokens, which leaves no room in the context of {}{}", tokens,
                      options_.context,
                      options_.context < decoder().spec().max_positions ? "; raise it with -c" : "");
  }
  for (int32_t id : request.prompt) {
    if (id < 0 || id >= decoder().spec().vocab) {
      return user_error("token id {} is outside the vocabulary of {}", id, decoder().spec().vocab);
    }
  }
  const Scheduler::Id id = next_id_++;
  Running running{.request = std::move(request), .tokens = {}, .sampler = Sampler(SamplingParams{})};
  running.tokens = running.request.prompt;
  running.sampler = Sampler(running.request.sampling);
  requests_.emplace(id, std::move(running));
  scheduler_->add(id, tokens);
  return id;
}

void Engine::cancel(Scheduler::Id id) {
  if (requests_.count(id) != 0) finish(id);
}

void Engine::finish(Scheduler::Id id) {
  auto found = requests_.find(id);
  if (found->second.slot >= 0) decoder().kv().remove_sequence(found->second.slot);
  scheduler_->remove(id);
  requests_.erase(found);
}

Result<std::vector<TokenEvent>> Engine::step() {
  std::vector<Scheduler::Id> admitted;
  const std::vector<Scheduler::Work> work = scheduler_->next(admitted);
  for (Scheduler::Id id : admitted) {
    // The scheduler admits no more than there are slots.
    NIBBLE_ASSIGN_OR_RETURN(requests_.at(id).slot, decoder().kv().add_sequence());
  }
  std::vector<TokenEvent> events;
  if (work.empty()) return events;
  std::vector<SequenceStep> steps;
  std::vector<Running*> choosing;
  for (const Scheduler::Work& w : work) {
    Running& running = requests_.at(w.id);
    const auto start = static_cast<size_t>(decoder().kv().length(running.slot));
    steps.push_back({.slot = running.slot,
                     .ids = std::span(running.tokens).subspan(start, static_cast<size_t>(w.rows)),
                     .logits = w.finishes_prompt ? WantLogits::kLast : WantLogits::kNone});
    if (w.finishes_prompt) choosing.push_back(&running);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, next_tokens(steps, choosing));
  size_t row = 0;
  for (const Scheduler::Work& w : work) {
    if (w.finishes_prompt) events.push_back(take_token(w.id, requests_.at(w.id), tokens[row++]));
  }
  for (const TokenEvent& event : events) {
    if (event.finish != FinishReason::kNone) {
      finish(event.id);
    } else {
      scheduler_->append(event.id);
    }
  }
  return events;
}

Result<std::vector<int32_t>> Engine::next_tokens(std::span<const SequenceStep> steps,
                                                 std::span<Running* const> choosing) {
  // Weights are not searched for NaN at load (that would read every byte); here it cannot hide.
  const auto no_numbers = [&] {
    return user_error("{}: the logits are no numbers (NaN): a weight of the checkpoint is broken",
                      options_.model);
  };
  std::vector<int32_t> tokens;
  if (std::ranges::all_of(choosing, [](const Running* r) { return r->sampler.needs_top_only(); })) {
    NIBBLE_ASSIGN_OR_RETURN(const Rows<const TokenLogit> top, decoder().forward_top(steps));
    for (int64_t i = 0; i < top.rows; ++i) {
      if (std::isnan(top.row(i)->logit)) return no_numbers();
    }
    for (int64_t i = 0; i < top.rows; ++i) {
      const std::span candidates(top.row(i), static_cast<size_t>(top.cols));
      tokens.push_back(choosing[static_cast<size_t>(i)]->sampler.sample_top(candidates));
    }
    return tokens;
  }
  NIBBLE_ASSIGN_OR_RETURN(const Rows<const float> logits, decoder().forward(steps));
  auto row = [&](int64_t i) { return std::span(logits.row(i), static_cast<size_t>(logits.cols)); };
  for (int64_t i = 0; i < logits.rows; ++i) {
    if (std::ranges::any_of(row(i), [](float x) { return std::isnan(x); })) return no_numbers();
  }
  for (int64_t i = 0; i < logits.rows; ++i) {
    Running& running = *choosing[static_cast<size_t>(i)];
    tokens.push_back(running.sampler.sample(row(i), running.tokens));
  }
  return tokens;
}

TokenEvent Engine::take_token(Scheduler::Id id, Running& running, int32_t token) {
  const Request& request = running.request;
  TokenEvent event{.id = id, .token = token};
  running.tokens.push_back(event.token);
  const auto generated = static_cast<int64_t>(running.tokens.size() - request.prompt.size());
  if (!request.ignore_eos && is_end(event.token)) {
    event.finish = FinishReason::kStop;
  } else if (request.max_tokens && generated >= *request.max_tokens) {
    event.finish = FinishReason::kLength;
  } else if (static_cast<int64_t>(running.tokens.size()) >= options_.context) {
    event.finish = FinishReason::kContext;
  }
  return event;
}

}  // namespace nibble
