// nibble run: one answer to a prompt, or a chat at the terminal.
#include <editline/readline.h>
#include <fmt/format.h>
#include <langinfo.h>
#include <unistd.h>

#include <chrono>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "arithmetic.h"
#include "base/log.h"
#include "base/numbers.h"
#include "commands.h"
#include "engine/engine.h"
#include "engine/text_output.h"
#include "ids.h"
#include "model_path.h"
#include "progress.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Ctrl-C ends the answer, not the program; a second one before the next prompt ends the program.
volatile std::sig_atomic_t g_interrupts = 0;
extern "C" void on_interrupt(int) {
  if (g_interrupts > 0) _exit(130);
  g_interrupts = 1;
}

// Ends the text's last line before lines on stderr follow.
void end_line() {
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

// What one answer took.
struct Timing {
  int64_t prompt_tokens = 0, new_tokens = 0;
  double prompt_seconds = 0;  // until the first token
  double decode_seconds = 0;  // from the first token to the last
};

// What the flags say, over `defaults`.
SamplingParams sampling_of(const RunOptions& options, SamplingParams defaults) {
  auto take = [](auto& to, const auto& from) {
    if (from) to = *from;
  };
  SamplingParams& p = defaults;
  take(p.temperature, options.temperature);
  take(p.top_k, options.top_k);
  take(p.top_p, options.top_p);
  take(p.min_p, options.min_p);
  take(p.repeat_penalty, options.repeat_penalty);
  take(p.presence_penalty, options.presence_penalty);
  take(p.frequency_penalty, options.frequency_penalty);
  take(p.penalty_last_n, options.repeat_last_n);
  return p;
}

// Special tokens around a text: a chat template writes its own.
enum class Around { kTokenizer, kNothing };

class Runner {
 public:
  Runner(Engine& engine, const RunOptions& options) : engine_(engine), options_(options) {
    SamplingParams& p = sampling_ = sampling_of(options, engine.default_sampling());
    p.seed = static_cast<uint64_t>(options.seed);
    if (options.seed < 0) {
      std::random_device device;
      p.seed = ((static_cast<uint64_t>(device()) << 32) | device()) >> 1;  // as --seed takes it
    }
    log_debug("seed {}", p.seed);
  }

  // Streams the answer to stdout, after `shown_first`, and returns it.
  Result<std::string> answer(const std::string& prompt, Around around, const std::string& shown_first = "") {
    NIBBLE_ASSIGN_OR_RETURN(
        std::vector<int32_t> ids,
        engine_.tokenizer().encode(prompt, {.add_special = around == Around::kTokenizer}));
    timing_ = {.prompt_tokens = static_cast<int64_t>(ids.size())};
    NIBBLE_ASSIGN_OR_RETURN(Scheduler::Id id, engine_.submit({.prompt = std::move(ids),
                                                              .sampling = sampling_,
                                                              .max_tokens = max_tokens(),
                                                              .ignore_eos = options_.ignore_eos}));
    // Whatever ends this function ends the request: the next one needs its place.
    struct Cancel {
      Engine& engine;
      Scheduler::Id id;
      ~Cancel() { engine.cancel(id); }
    } cancel{engine_, id};
    TextOutput output(engine_.tokenizer(), options_.stop);
    std::string text;
    if (!options_.json) std::fwrite(shown_first.data(), 1, shown_first.size(), stdout);
    auto show = [&](const std::string& piece) {
      text += piece;
      if (options_.json) return;
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
    const Clock::time_point start = Clock::now();
    Clock::time_point first = start;
    FinishReason finish = FinishReason::kNone;
    while (finish == FinishReason::kNone && !output.stopped()) {
      if (g_interrupts > 0) break;
      NIBBLE_ASSIGN_OR_RETURN(std::vector<TokenEvent> events, engine_.step());
      for (const TokenEvent& event : events) {
        if (timing_.new_tokens++ == 0) first = Clock::now();
        finish = event.finish;
        if (finish != FinishReason::kStop) show(output.push(event.token));
      }
    }
    show(output.finish());
    timing_.prompt_seconds = std::chrono::duration<double>(first - start).count();
    timing_.decode_seconds = seconds_since(first);
    if (!options_.json) end_line();
    if (finish == FinishReason::kContext) {
      const bool could_be_more = engine_.options().context < engine_.decoder().spec().max_positions;
      log_warning("the context of {} tokens is full{}", engine_.options().context,
                  could_be_more ? "; raise it with -c" : "");
    }
    return text;
  }

  void log_timing() const {
    if (options_.no_stats) return;
    const Timing& t = timing_;
    auto rate = [](int64_t tokens, double seconds) {
      return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
    };
    if (t.new_tokens == 0) return;  // interrupted before there was anything to time
    log_info("prompt: {} tokens in {:.3f} s, {:.1f} tok/s; first token after {:.3f} s", t.prompt_tokens,
             t.prompt_seconds, rate(t.prompt_tokens, t.prompt_seconds), t.prompt_seconds);
    // The first token came with the prompt: decoding is what followed.
    const double decode_rate = rate(t.new_tokens - 1, t.decode_seconds);
    const double gb_per_token = static_cast<double>(engine_.weight_bytes_per_token()) / 1e9;
    const ExpertArithmetic& arithmetic = engine_.options().arithmetic;
    log_info("decode: {} tokens in {:.3f} s, {:.1f} tok/s; {:.4f} GB/token of weights, {:.2f} GB/s{}",
             t.new_tokens, t.decode_seconds, decode_rate, gb_per_token, gb_per_token * decode_rate,
             arithmetic.w4a4 ? "; experts in " + describe(arithmetic) : "");
  }

  // The answer with its timing, for programs.
  void print_json(const std::string& text) const {
    const Timing& t = timing_;
    const nlohmann::ordered_json json = {{"text", text},
                                         {"prompt_tokens", t.prompt_tokens},
                                         {"generated_tokens", t.new_tokens},
                                         {"prompt_seconds", t.prompt_seconds},
                                         {"decode_seconds", t.decode_seconds},
                                         {"weight_bytes_per_token", engine_.weight_bytes_per_token()},
                                         {"moe_arith", describe(engine_.options().arithmetic)},
                                         {"cpu_activations", options_.model.cpu_activations},
                                         {"seed", sampling_.seed}};
    fmt::print("{}\n", json.dump(2));
  }

 private:
  std::optional<int64_t> max_tokens() const {
    return options_.max_tokens < 0 ? std::nullopt : std::optional(options_.max_tokens);
  }

  Engine& engine_;
  const RunOptions& options_;
  SamplingParams sampling_;
  Timing timing_;
};

nlohmann::ordered_json message(const std::string& role, const std::string& content) {
  return {{"role", role}, {"content", repair_utf8(content)}};
}

nlohmann::ordered_json first_messages(const RunOptions& options) {
  nlohmann::ordered_json messages = nlohmann::ordered_json::array();
  if (!options.system.empty()) messages.push_back(message("system", options.system));
  return messages;
}

Status run_once(Engine& engine, const RunOptions& options, const std::string& prompt) {
  Runner runner(engine, options);
  std::string text;
  if (options.system.empty()) {
    // The text goes on from the prompt.
    NIBBLE_ASSIGN_OR_RETURN(text, runner.answer(prompt, Around::kTokenizer, prompt));
  } else {
    nlohmann::ordered_json messages = first_messages(options);
    messages.push_back(message("user", prompt));
    NIBBLE_ASSIGN_OR_RETURN(std::string chat, engine.chat().render(messages, true));
    NIBBLE_ASSIGN_OR_RETURN(text, runner.answer(chat, Around::kNothing));
  }
  if (options.json) {
    runner.print_json(text);
  } else {
    runner.log_timing();
  }
  return {};
}

// The next line that the user types; nothing at the end of the input.
std::optional<std::string> read_line(bool terminal) {
  if (!terminal) {
    std::string line;
    return std::getline(std::cin, line) ? std::optional(line) : std::nullopt;
  }
  char* typed = ::readline("> ");
  if (typed == nullptr) return std::nullopt;
  std::string line = typed;
  if (!line.empty()) ::add_history(typed);
  std::free(typed);  // NOLINT(cppcoreguidelines-no-malloc): readline's contract
  return line;
}

Status chat(Engine& engine, const RunOptions& options) {
  nlohmann::ordered_json messages = first_messages(options);
  // Says at once what a conversation with this model needs, before anything is typed.
  if (!engine.chat().has_template()) return engine.chat().render(messages, true).status();
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  // Line editing reads characters in the user's encoding; without a locale it drops all but ASCII.
  if (std::setlocale(LC_CTYPE, "") == nullptr || std::string(::nl_langinfo(CODESET)) != "UTF-8") {
    std::setlocale(LC_CTYPE, "C.UTF-8");
  }
  if (terminal)
    log_info("chat: Ctrl-C stops an answer, /clear forgets the conversation, Ctrl-D or /exit ends");
  Runner runner(engine, options);
  while (true) {
    g_interrupts = 0;
    std::optional<std::string> line = read_line(terminal);
    if (!line && g_interrupts > 0) {
      end_line();  // Ctrl-C drops what was typed, as in a shell
      continue;
    }
    if (!line || *line == "/exit") break;
    if (line->empty()) continue;
    if (*line == "/clear") {
      messages = first_messages(options);
      continue;
    }
    messages.push_back(message("user", *line));
    NIBBLE_ASSIGN_OR_RETURN(std::string prompt, engine.chat().render(messages, true));
    g_interrupts = 0;
    Result<std::string> answer = runner.answer(prompt, Around::kNothing);
    if (!answer.ok()) {
      // A conversation that has grown out of the context must not take the program down.
      log_error("{}; /clear starts anew", answer.status().message());
      messages.erase(messages.size() - 1);
      continue;
    }
    runner.log_timing();
    messages.push_back(message("assistant", *answer));
  }
  return {};
}

}  // namespace

Status run_command(const RunOptions& options) {
  std::optional<std::string> prompt = options.prompt;
  if (!options.prompt_file.empty()) {
    if (prompt) return user_error("-p and -f both give a prompt; wanted one of them");
    if (options.prompt_file == "-") {
      NIBBLE_ASSIGN_OR_RETURN(prompt, read_standard_input());
    } else {
      NIBBLE_ASSIGN_OR_RETURN(prompt, read_text(FileSystem::posix(), options.prompt_file, kMaxInputBytes));
    }
  }
  // What can be known to be wrong is said before gigabytes are read.
  NIBBLE_RETURN_IF_ERROR(sampling_of(options, {}).check());
  if (prompt && prompt->empty()) return user_error("the prompt is empty; wanted at least one token");
  if (options.max_tokens == 0) return user_error("-n 0: nothing to generate; wanted -1 or at least 1");
  if (options.json && !prompt) return user_error("--json needs a prompt: give one with -p or -f");
  NIBBLE_ASSIGN_OR_RETURN(const ExpertArithmetic arithmetic, arithmetic_of(options.model));
  NIBBLE_ASSIGN_OR_RETURN(const std::string model, find_model(options.model.model));
  ProgressLine progress("loading " + options.model.model);
  NIBBLE_ASSIGN_OR_RETURN(
      std::unique_ptr<Engine> engine,
      Engine::load(FileSystem::posix(),
                   {.model = model,
                    .device = options.model.device,
                    .backend = backend_options(options.model),
                    .context = options.model.context,
                    .prefill_chunk = options.model.prefill_chunk,
                    .chat_template = options.chat_template,
                    .arithmetic = arithmetic},
                   [&](int64_t loaded, int64_t total) { progress.update(loaded, total); }));
  progress.finish(engine->checkpoint_bytes());
  log_debug("{}; context {}, KV cache {}", engine->decoder().ops().description(), engine->options().context,
            format_bytes(engine->decoder().kv().bytes()));
  for (const std::string& line : engine->decoder().ops().choices()) log_debug("{}", line);
  std::signal(SIGINT, on_interrupt);
  return prompt ? run_once(*engine, options, *prompt) : chat(*engine, options);
}

}  // namespace nibble
