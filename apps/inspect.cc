// nibble inspect: what a model directory holds, and what would not load and why.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>
#include <nlohmann/json.hpp>

#include "base/numbers.h"
#include "checkpoint/checkpoint.h"
#include "commands.h"
#include "engine/chat_format.h"
#include "engine/generation_config.h"
#include "model/spec.h"
#include "model/weights.h"
#include "model_path.h"
#include "ops/backend.h"
#include "text/tokenizer.h"

namespace nibble {
namespace {

// What a tensor is for, by its name; for people.
std::string kind_of(const std::string& name) {
  auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (has("shared_expert")) return "shared expert";
  if (has("experts.") && !has("e_score_correction_bias")) return "routed experts";
  if (has("e_score_correction_bias") || has("mlp.gate.") || has("router")) return "router";
  if (has("embed_tokens")) return "embedding";
  if (has("lm_head")) return "head";
  if (has("norm")) return "norms";
  if (has("self_attn")) return "attention";
  if (has("mlp")) return "dense feed-forward";
  return "other";
}

// The format that a tensor belongs to: 4-bit codes and their scales count together.
std::string format_of(const Checkpoint& checkpoint, const TensorInfo& tensor) {
  auto strip = [&](const std::string& end) {
    return tensor.name.ends_with(end) ? tensor.name.substr(0, tensor.name.size() - end.size())
                                      : std::string();
  };
  for (const char* end : {".weight", ".weight_packed", ".weight_scale", ".weight_scale_2",
                          ".weight_global_scale", ".input_scale", ".input_global_scale"}) {
    std::string prefix = strip(end);
    if (!prefix.empty() &&
        (checkpoint.has(prefix + ".weight_scale_2") || checkpoint.has(prefix + ".weight_global_scale"))) {
      return "NVFP4";
    }
  }
  return std::string(dtype_name(tensor.dtype));
}

struct Report {
  std::map<std::pair<std::string, std::string>, int64_t> bytes;  // by kind and format
  std::vector<std::string> problems;                             // why it would not load
  std::optional<ModelSpec> spec;
  std::optional<Checkpoint> checkpoint;
  std::optional<int64_t> bytes_per_token;
  std::optional<int32_t> tokenizer_vocab;
  bool chat_template = false;
};

Report examine(const std::string& directory) {
  const FileSystem& files = FileSystem::posix();
  Report report;
  auto note = [&](const Status& status) {
    if (!status.ok()) report.problems.push_back(status.message());
    return status.ok();
  };
  if (auto spec = load_spec(files, directory); note(spec.status())) report.spec = std::move(*spec);
  if (report.spec) note(GenerationConfig::load(files, directory, report.spec->vocab).status());
  if (auto tokenizer = Tokenizer::load(files, directory); note(tokenizer.status())) {
    report.tokenizer_vocab = tokenizer->vocab_size();
  }
  if (auto chat = ChatFormat::load(files, directory); note(chat.status()))
    report.chat_template = chat->has_template();
  auto checkpoint = Checkpoint::open(files, directory);
  if (!note(checkpoint.status())) return report;
  report.checkpoint = std::move(*checkpoint);
  for (const TensorInfo* tensor : report.checkpoint->tensors()) {
    report.bytes[{kind_of(tensor->name), format_of(*report.checkpoint, *tensor)}] += tensor->bytes;
  }
  if (!report.spec) return report;
  // The reference backend takes weights as they lie in the file, so this reads scales and vectors only.
  auto ops = make_backend("reference", {.threads = 1});
  if (!note(ops.status())) return report;
  auto weights = load_weights(*report.spec, *report.checkpoint, **ops);
  if (note(weights.status())) report.bytes_per_token = weight_bytes_per_token(*report.spec, *weights);
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
  if (report.checkpoint) {
    const Checkpoint& checkpoint = *report.checkpoint;
    fmt::print("tensors        {}, {}\n", checkpoint.tensors().size(),
               format_bytes(checkpoint.total_bytes()));
    for (const auto& [key, bytes] : report.bytes) {
      fmt::print("  {:<20} {:<8} {:>12}  {:5.1f}%\n", key.first, key.second, format_bytes(bytes),
                 100.0 * static_cast<double>(bytes) /
                     static_cast<double>(std::max<int64_t>(checkpoint.total_bytes(), 1)));
    }
    if (options.tensors) {
      for (const TensorInfo* tensor : checkpoint.tensors()) {
        fmt::print("  {:<70} {:<8} {}\n", tensor->name, dtype_name(tensor->dtype),
                   format_shape(tensor->shape));
      }
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
  if (report.checkpoint) {
    json["total_bytes"] = report.checkpoint->total_bytes();
    for (const auto& [key, bytes] : report.bytes) json["bytes"][key.first][key.second] = bytes;
    if (options.tensors) {
      for (const TensorInfo* tensor : report.checkpoint->tensors()) {
        json["tensors"].push_back({{"name", tensor->name},
                                   {"dtype", dtype_name(tensor->dtype)},
                                   {"shape", tensor->shape},
                                   {"bytes", tensor->bytes}});
      }
    }
  }
  if (report.bytes_per_token) json["weight_bytes_per_token"] = *report.bytes_per_token;
  json["problems"] = report.problems;
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

}  // namespace

Status inspect_command(const InspectOptions& options) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string directory, find_model(options.model));
  const Report report = examine(directory);
  if (options.json) {
    print_json(report, options);
  } else {
    print_text(report, options);
  }
  if (report.problems.empty()) return {};
  return user_error("{} would not load: {}", options.model, report.problems[0]);
}

}  // namespace nibble
