// nibble inspect: what a model's files hold, and what would not load and why.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/numbers.h"
#include "commands.h"
#include "engine/model_source.h"
#include "model/spec.h"
#include "model/weights.h"
#include "model_path.h"
#include "ops/backend.h"

namespace nibble {
namespace {

// What a tensor is for, by its name; for people.
std::string kind_of(const std::string& name) {
  auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  // Names of GGUF stand beside those of the other files; no part of one is in a name of another kind.
  if (has("shared_expert") || has("_shexp.")) return "shared expert";
  if ((has("experts.") && !has("e_score_correction_bias")) || has("_exps.")) return "routed experts";
  if (has("e_score_correction_bias") || has("mlp.gate.") || has("router") || has("ffn_gate_inp.") ||
      has("exp_probs_b"))
    return "router";
  if (has("embed_tokens") || has("token_embd")) return "embedding";
  if (has("lm_head") || name.starts_with("output.")) return "head";
  if (has("norm")) return "norms";
  if (has("self_attn") || has(".attn_")) return "attention";
  if (has("mlp") || has(".ffn_")) return "dense feed-forward";
  return "other";
}

struct Report {
  std::map<std::pair<std::string, std::string>, int64_t> bytes;  // by kind and format
  std::vector<std::string> problems;                             // why it would not load
  std::optional<ModelSpec> spec;
  std::unique_ptr<WeightSource> weights;
  std::optional<int64_t> bytes_per_token;
  std::optional<int32_t> tokenizer_vocab;
  bool chat_template = false;
};

Report examine(const ModelSource& source) {
  Report report;
  auto note = [&](const Status& status) {
    if (!status.ok()) report.problems.push_back(status.message());
    return status.ok();
  };
  if (auto spec = source.spec(); note(spec.status())) report.spec = std::move(*spec);
  if (report.spec) note(source.generation(report.spec->vocab).status());
  if (auto tokenizer = source.tokenizer(); note(tokenizer.status())) {
    report.tokenizer_vocab = tokenizer->vocab_size();
  }
  if (auto chat = source.chat(); note(chat.status())) report.chat_template = chat->has_template();
  // Without a spec the tensors can be listed all the same.
  auto weights = source.weights(report.spec.value_or(ModelSpec()), [](MatrixFormat) { return true; });
  if (!note(weights.status())) return report;
  report.weights = std::move(*weights);
  for (const StoredTensor& tensor : report.weights->stored()) {
    report.bytes[{kind_of(tensor.name), std::string(tensor.format)}] += tensor.bytes;
  }
  if (!report.spec) return report;
  // The reference backend takes weights as they lie in the file, so this reads scales and vectors only.
  auto ops = make_backend("reference", {.threads = 1});
  if (!note(ops.status())) return report;
  auto loaded = load_weights(*report.spec, *report.weights, **ops);
  if (note(loaded.status())) report.bytes_per_token = weight_bytes_per_token(*report.spec, *loaded);
  return report;
}

std::string describe_mixer(const MixerSpec& mixer) {
  if (const auto* gqa = std::get_if<GqaSpec>(&mixer)) {
    return fmt::format("{} attention, {} heads, {} kv heads x {}",
                       gqa->window > 0 ? fmt::format("window {}", gqa->window) : "full", gqa->heads,
                       gqa->kv_heads, gqa->head_dim);
  }
  if (const auto* mla = std::get_if<MlaSpec>(&mixer)) {
    return fmt::format("{} attention, {} heads, latent {}",
                       mla->indexer || mla->shares_selection ? "sparse latent" : "latent", mla->heads,
                       mla->latent_dim());
  }
  const auto& kda = std::get<KdaSpec>(mixer);
  return fmt::format("delta attention, {} heads x {}", kda.heads, kda.head_dim);
}

std::string describe_layers(const ModelSpec& spec) {
  // Runs of equal layers as one line each.
  std::string text;
  auto describe = [&](const LayerSpec& layer) {
    const std::string line = describe_mixer(layer.mixer);
    if (!layer.moe) return line + fmt::format("; dense {}", layer.dense_width);
    std::string shared =
        layer.moe->shared_width > 0 ? fmt::format(", shared expert {}", layer.moe->shared_width) : "";
    return line + fmt::format("; {} experts x {}, {} chosen{}", layer.moe->experts, layer.moe->width,
                              layer.moe->chosen, shared);
  };
  for (size_t i = 0; i < spec.layers.size();) {
    size_t end = i + 1;
    while (end < spec.layers.size() && describe(spec.layers[end]) == describe(spec.layers[i])) ++end;
    std::string numbers = end - i == 1 ? std::to_string(i) : fmt::format("{}-{}", i, end - 1);
    text += fmt::format("  layer {:<7} {}\n", numbers, describe(spec.layers[i]));
    i = end;
  }
  return text;
}

void print_text(const Report& report, const InspectOptions& options) {
  if (report.spec) {
    const ModelSpec& spec = *report.spec;
    fmt::print("architecture   {}: {} layers, width {}, vocabulary {}, {} positions{}\n", spec.family,
               spec.layers.size(), spec.width, spec.vocab, spec.max_positions,
               spec.tied_head ? ", tied head" : "");
    fmt::print("{}", describe_layers(spec));
    if (!spec.ignored_config_keys.empty()) {
      fmt::print("unknown keys   {}\n", fmt::join(spec.ignored_config_keys, ", "));
    }
  }
  if (report.tokenizer_vocab) fmt::print("tokenizer      {} tokens\n", *report.tokenizer_vocab);
  fmt::print("chat template  {}\n", report.chat_template ? "yes" : "no");
  if (report.weights) {
    const std::vector<StoredTensor> tensors = report.weights->stored();
    const int64_t total_bytes = report.weights->total_bytes();
    fmt::print("tensors        {}, {}\n", tensors.size(), format_bytes(total_bytes));
    for (const auto& [key, bytes] : report.bytes) {
      fmt::print("  {:<20} {:<10} {:>12}  {:5.1f}%\n", key.first, key.second, format_bytes(bytes),
                 100.0 * static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(total_bytes, 1)));
    }
    if (options.tensors) {
      for (const StoredTensor& tensor : tensors)
        fmt::print("  {:<70} {:<8} {}\n", tensor.name, tensor.dtype, format_shape(tensor.shape));
    }
  }
  if (report.bytes_per_token)
    fmt::print("a token reads  {} of weights\n", format_bytes(*report.bytes_per_token));
  for (const std::string& problem : report.problems) fmt::print("would not load {}\n", problem);
  if (report.problems.empty()) fmt::print("loads          yes\n");
}

void print_json(const Report& report, const InspectOptions& options) {
  nlohmann::ordered_json json;
  if (report.spec) {
    json["architecture"] = report.spec->family;
    json["layers"] = report.spec->layers.size();
    json["width"] = report.spec->width;
    json["vocab_size"] = report.spec->vocab;
    json["max_positions"] = report.spec->max_positions;
    json["unknown_config_keys"] = report.spec->ignored_config_keys;
  }
  if (report.tokenizer_vocab) json["tokenizer_vocab_size"] = *report.tokenizer_vocab;
  json["chat_template"] = report.chat_template;
  if (report.weights) {
    json["total_bytes"] = report.weights->total_bytes();
    for (const auto& [key, bytes] : report.bytes) json["bytes"][key.first][key.second] = bytes;
    if (options.tensors) {
      for (const StoredTensor& tensor : report.weights->stored()) {
        json["tensors"].push_back({{"name", tensor.name},
                                   {"dtype", tensor.dtype},
                                   {"shape", tensor.shape},
                                   {"bytes", tensor.bytes}});
      }
    }
  }
  if (report.bytes_per_token) json["weight_bytes_per_token"] = *report.bytes_per_token;
  json["problems"] = report.problems;
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

Status inspect_command(const InspectOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string path, find_model(options.model));
  NIBBLE_ASSIGN_OR_RETURN(const std::unique_ptr<ModelSource> source,
                          ModelSource::open(FileSystem::posix(), path));
  const Report report = examine(*source);
  if (options.json) {
    print_json(report, options);
  } else {
    print_text(report, options);
  }
  if (report.problems.empty()) return {};
  return user_error("{} would not load: {}", options.model, report.problems[0]);
}

}  // namespace nibble
