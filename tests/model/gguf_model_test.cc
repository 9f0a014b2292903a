// GGUF to a model: the same logits as the same weights give in safetensors, for each architecture; and what
// is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "golden_file.h"
#include "model/gguf_models.h"
#include "model/test_model.h"

namespace nibble {
namespace {

using Edit = std::function<void(GgufWriter&)>;

// A model in its own format, and the metadata that says the same.
struct Family {
  const char* arch;
  const char* golden;  // directory of the golden checkpoint; null: random weights of `config`
  const char* config;
  const char* ffn_norm;
  Edit metadata;
};

void PrintTo(const Family& family, std::ostream* out) { *out << family.arch; }

void common_metadata(GgufWriter& w, const std::string& arch, uint32_t layers, float eps) {
  w.text("general.architecture", arch)
      .text("general.type", "model")
      .u32(arch + ".block_count", layers)
      .u32(arch + ".context_length", 4096)
      .u32(arch + ".embedding_length", 128)
      .u32(arch + ".vocab_size", 384)
      .u32(arch + ".attention.head_count_kv", 2)
      .f32(arch + ".attention.layer_norm_rms_epsilon", eps)
      .u32(arch + ".attention.key_length", 32)
      .u32(arch + ".attention.value_length", 32)
      .u32("tokenizer.ggml.eos_token_id", 2);
}

void experts(GgufWriter& w, const std::string& arch, uint32_t width) {
  w.u32(arch + ".expert_count", 16)
      .u32(arch + ".expert_used_count", 4)
      .u32(arch + ".expert_feed_forward_length", width);
}

constexpr const char* kDenseConfig = R"({"model_type": "MODEL", "hidden_size": 128, "vocab_size": 384,
  "num_hidden_layers": 3, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 256, "rope_theta": 500000.0,
  "tie_word_embeddings": true, "eos_token_id": 2})";

std::vector<Family> families() {
  return {
      {"laguna", "laguna", nullptr, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "laguna", 5, 1e-6f);
         experts(w, "laguna", 64);
         std::string heads;
         for (uint32_t count : {4u, 6u, 6u, 4u, 6u}) heads += number_bytes(count);
         w.array("laguna.attention.head_count", GgufValueType::kU32, 5, heads)
             .u32("laguna.feed_forward_length", 256)
             .u32("laguna.attention.sliding_window", 24)
             .array("laguna.attention.sliding_window_pattern", GgufValueType::kBool, 5,
                    std::string("\0\1\1\0\1", 5))
             .f32("laguna.rope.freq_base", 500000)
             .u32("laguna.rope.dimension_count", 16)
             .f32("laguna.rope.freq_base_swa", 10000)
             .u32("laguna.rope.dimension_count_swa", 32)
             .text("laguna.rope.scaling.type", "yarn")
             .f32("laguna.rope.scaling.factor", 8)
             .u32("laguna.rope.scaling.original_context_length", 64)
             .f32("laguna.rope.scaling.yarn_beta_fast", 32)
             .f32("laguna.rope.scaling.yarn_beta_slow", 1)
             .f32("laguna.rope.scaling.yarn_ext_factor", 1)
             .f32("laguna.rope.scaling.yarn_attn_factor", 1.2079442f)
             .u32("laguna.expert_gating_func", 2)
             .boolean("laguna.expert_weights_norm", true)
             .f32("laguna.expert_weights_scale", 2.5f)
             .u32("laguna.expert_shared_count", 1)
             .u32("laguna.expert_shared_feed_forward_length", 64)
             .u32("laguna.leading_dense_block_count", 1);
       }},
      {"qwen3moe", "qwen3_moe-nvfp4", nullptr, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "qwen3moe", 4, 1e-6f);
         experts(w, "qwen3moe", 64);
         w.u32("qwen3moe.attention.head_count", 4)
             .u32("qwen3moe.feed_forward_length", 256)
             .f32("qwen3moe.rope.freq_base", 10000);
       }},
      {"glm4moe", "glm4_moe-nvfp4", nullptr, "post_attention_norm",
       [](GgufWriter& w) {
         common_metadata(w, "glm4moe", 5, 1e-5f);
         experts(w, "glm4moe", 64);
         w.u32("glm4moe.attention.head_count", 4)
             .u32("glm4moe.feed_forward_length", 256)
             .u32("glm4moe.nextn_predict_layers", 1)
             .u32("glm4moe.rope.dimension_count", 16)
             .f32("glm4moe.rope.freq_base", 10000)
             .u32("glm4moe.leading_dense_block_count", 1)
             .u32("glm4moe.expert_shared_count", 1)
             .u32("glm4moe.expert_gating_func", 2)
             .u32("glm4moe.expert_group_count", 4)
             .u32("glm4moe.expert_group_used_count", 2)
             .boolean("glm4moe.expert_weights_norm", true)
             .f32("glm4moe.expert_weights_scale", 1.5f)
             .tensor("blk.4.nextn.eh_proj.weight", {4, 4}, kGgufF32, std::string(64, '\0'))
             .tensor("blk.4.attn_norm.weight", {128}, kGgufF32, std::string(512, '\0'));
       }},
      {"gpt-oss", "gpt_oss-mxfp4", nullptr, "post_attention_norm",
       [](GgufWriter& w) {
         common_metadata(w, "gpt-oss", 4, 1e-5f);
         experts(w, "gpt-oss", 128);
         w.u32("gpt-oss.attention.head_count", 4)
             .u32("gpt-oss.feed_forward_length", 128)
             .u32("gpt-oss.attention.sliding_window", 24)
             .f32("gpt-oss.rope.freq_base", 150000)
             .text("gpt-oss.rope.scaling.type", "yarn")
             .f32("gpt-oss.rope.scaling.factor", 32)
             .u32("gpt-oss.rope.scaling.original_context_length", 4096);
       }},
      {"qwen3", nullptr, kDenseConfig, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "qwen3", 3, 1e-5f);
         w.u32("qwen3.attention.head_count", 4)
             .u32("qwen3.feed_forward_length", 256)
             .f32("qwen3.rope.freq_base", 500000);
       }},
      {"llama", nullptr, kDenseConfig, "ffn_norm",
       [](GgufWriter& w) {
         common_metadata(w, "llama", 3, 1e-5f);
         w.u32("llama.attention.head_count", 4)
             .u32("llama.feed_forward_length", 256)
             .u32("llama.rope.dimension_count", 32)
             .f32("llama.rope.freq_base", 500000);
       }},
  };
}

std::string config_of(const Family& family) {
  if (family.config == nullptr)
    return read_text(FileSystem::posix(), golden_directory(family.golden) + "/config.json", 1 << 20).value();
  std::string config = family.config;
  return config.replace(config.find("MODEL"), 5, family.arch);
}

ModelSpec spec_of_text(const std::string& config) {
  auto spec = parse_spec(config, "config.json");
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  return std::move(spec).value();
}

// Row 2i of each head is row i, row 2i + 1 is row i + K/2: what the architecture "llama" does to q and k.
RecordedTensors interleaved(RecordedTensors tensors, int64_t head_dim) {
  for (auto& [name, tensor] : tensors) {
    if (name.find("q_proj.weight") == std::string::npos && name.find("k_proj.weight") == std::string::npos)
      continue;
    const std::vector<float> halves = tensor.values;
    const int64_t k = tensor.shape[1];
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      const int64_t head = row / head_dim, i = row % head_dim;
      const int64_t from = head * head_dim + i / 2 + (i % 2 == 0 ? 0 : head_dim / 2);
      std::copy_n(halves.begin() + from * k, k, tensor.values.begin() + row * k);
    }
  }
  return tensors;
}

class GgufModel : public testing::TestWithParam<Family> {
 protected:
  GgufModel() : config_(config_of(GetParam())), spec_(spec_of_text(config_)) {
    auto ops = make_backend("reference", {.threads = 1}).value();
    std::unique_ptr<WeightSource> source;
    if (GetParam().golden != nullptr) {
      source_ = std::make_unique<Checkpoint>(
          Checkpoint::open(FileSystem::posix(), golden_directory(GetParam().golden)).value());
    }
    Recorder recorder(source_.get());
    const Status status = load_weights(spec_, recorder, *ops).status();
    EXPECT_TRUE(status.ok()) << status.message();
    tensors_ = std::move(recorder.tensors);
    for (int32_t i = 0; i < 70; ++i) ids_.push_back((i * 53 + 7) % 384);
  }

  std::vector<float> logits(std::unique_ptr<WeightSource> source, const ModelSpec& spec,
                            const std::string& backend) const {
    return load_test_model(std::move(source), spec, backend, options_for(70)).logits(ids_, ids_.size());
  }
  std::vector<float> safetensors_logits(const RecordedTensors& tensors, const ModelSpec& spec,
                                        const std::string& backend) const {
    return logits(open_safetensors(safetensors_of(tensors)), spec, backend);
  }
  std::vector<float> gguf_logits(const RecordedTensors& tensors, Packing packing, const std::string& backend,
                                 const Edit& edit = {}) const {
    GgufWriter writer;
    GetParam().metadata(writer);
    add_tensors(writer, tensors, GetParam().ffn_norm, packing);
    if (edit) edit(writer);
    const std::shared_ptr<Gguf> gguf = open_gguf(writer);
    auto spec = load_gguf_spec(*gguf);
    EXPECT_TRUE(spec.ok()) << spec.status().message();
    EXPECT_TRUE(spec->ignored_config_keys.empty()) << spec->ignored_config_keys.front();
    return logits(std::make_unique<GgufWeights>(gguf, *spec), *spec, backend);
  }

  bool is_llama() const { return std::string(GetParam().arch) == "llama"; }

  std::string config_;
  ModelSpec spec_;
  std::unique_ptr<WeightSource> source_;
  RecordedTensors tensors_;
  std::vector<int32_t> ids_;
};

class PackedGgufModel : public GgufModel {};
class LlamaGgufModel : public GgufModel {};

double worst_error(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0, error = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(b[i])));
    error = std::max(error, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return error / largest;
}

// The same numbers in the same order of sums: no bit differs.
TEST_P(GgufModel, FloatsGiveTheLogitsOfSafetensors) {
  RecordedTensors tensors = tensors_;
  ModelSpec spec = spec_;
  if (is_llama()) {
    tensors = interleaved(tensors_, 32);
    spec = spec_of_text(config_.substr(0, config_.rfind('}')) + R"(, "rope_interleaved": true})");
  }
  for (const char* backend : {"reference", "cpu"}) {
    const std::vector<float> wanted = safetensors_logits(tensors, spec, backend);
    EXPECT_TRUE(gguf_logits(tensors, Packing::kF32, backend) == wanted) << backend;
    if (is_llama()) {
      // And the permutation is that of the halves, up to the order of the sum over a head.
      EXPECT_LT(worst_error(wanted, safetensors_logits(tensors_, spec_, backend)), 1e-5) << backend;
    }
  }
}

// NVFP4, MXFP4 and BF16 as GGUF packs them. On the reference a weight is the same float either way; the cpu
// backend has other kernels for blocks.
TEST_P(PackedGgufModel, PackedWeightsGiveTheLogitsOfTheCheckpoint) {
  for (const char* backend : {"reference", "cpu"}) {
    TestModel golden = load_test_model(golden_directory(GetParam().golden), backend, options_for(70));
    const std::vector<float> wanted = golden.logits(ids_, ids_.size());
    const std::vector<float> found = gguf_logits(tensors_, Packing::kAsStored, backend);
    if (std::string(backend) == "reference" || std::string(GetParam().arch) == "laguna") {
      EXPECT_TRUE(found == wanted) << backend << ": " << worst_error(found, wanted);
    }
    EXPECT_LT(worst_error(found, wanted), 2e-5) << backend;
  }
}

// rope_freqs divides the frequencies: divisors of 4 are positions of a quarter.
TEST_P(LlamaGgufModel, RopeDivisorsCount) {
  const RecordedTensors tensors = interleaved(tensors_, 32);
  const auto with = [&](float divisor) {
    return gguf_logits(tensors, Packing::kF32, "reference", [&](GgufWriter& w) {
      w.tensor("rope_freqs.weight", {16}, kGgufF32, bytes_of(std::vector<float>(16, divisor)));
    });
  };
  const std::vector<float> plain = gguf_logits(tensors, Packing::kF32, "reference");
  EXPECT_TRUE(with(1) == plain);
  EXPECT_GT(worst_error(with(4), plain), 1e-3);
}

std::vector<Family> families_that(const std::function<bool(const Family&)>& wanted) {
  std::vector<Family> some = families();
  std::erase_if(some, [&](const Family& family) { return !wanted(family); });
  return some;
}

std::string name_of(const testing::TestParamInfo<Family>& info) {
  std::string name = info.param.arch;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(Architectures, GgufModel, testing::ValuesIn(families()), name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, PackedGgufModel, testing::ValuesIn(families_that([](const Family& f) {
                           return f.golden != nullptr;
                         })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, LlamaGgufModel, testing::ValuesIn(families_that([](const Family& f) {
                           return std::string(f.arch) == "llama";
                         })),
                         name_of);

// Metadata that says other things than we implement. `edit` comes first, so that a key there hides the
// family's own: a key that is there twice is refused by the reader.
struct Refused {
  const char* arch;
  const char* key;
  Edit replace;
  const char* fragment;  // of the message
};

// Leaves out one key of the family's, by writing it under another name.
std::string without_key(std::string file, const std::string& key) {
  const size_t at = file.find(string_bytes(key));
  EXPECT_NE(at, std::string::npos) << key;
  if (at != std::string::npos) file.replace(at + 8, 3, "zzz");
  return file;
}

TEST(GgufConfig, WhatIsNotImplementedIsRefusedByKeyAndValue) {
  const auto u32 = [](const char* key, uint32_t value) { return [=](GgufWriter& w) { w.u32(key, value); }; };
  const auto f32 = [](const char* key, float value) { return [=](GgufWriter& w) { w.f32(key, value); }; };
  const auto text = [](const char* key, const char* value) {
    return [=](GgufWriter& w) { w.text(key, value); };
  };
  const Refused table[] = {
      {"llama", "general.architecture", text("general.architecture", "mamba"),
       "'general.architecture' = 'mamba' is not implemented; implemented: glm4moe, gpt-oss, laguna"},
      {"llama", "general.architecture", u32("general.architecture", 7),
       "'general.architecture': wanted a string"},
      {"llama", "general.type", text("general.type", "adapter"), "'general.type': wanted one of model"},
      {"llama", "llama.embedding_length", u32("llama.embedding_length", 0), "'llama.embedding_length'"},
      {"llama", "llama.embedding_length", nullptr, "'llama.embedding_length'"},
      {"llama", "llama.block_count", u32("llama.block_count", 4000000), "'llama.block_count': wanted"},
      {"llama", "llama.context_length", nullptr, "key 'llama.context_length' is missing"},
      {"llama", "llama.context_length", text("llama.context_length", "many"),
       "key 'llama.context_length' = \"many\": wanted an integer"},
      {"llama", "llama.attention.head_count", u32("llama.attention.head_count", 3),
       "3 query heads are no multiple of 2"},
      {"llama", "llama.attention.value_length", u32("llama.attention.value_length", 64),
       "'llama.attention.value_length': wanted 32"},
      {"llama", "llama.attention.layer_norm_rms_epsilon",
       f32("llama.attention.layer_norm_rms_epsilon", std::nanf("")), "layer_norm_rms_epsilon"},
      {"llama", "llama.feed_forward_length",
       [](GgufWriter& w) {
         w.array("llama.feed_forward_length", GgufValueType::kU32, 1, number_bytes(256u));
       },
       "'llama.feed_forward_length': wanted a single value"},
      {"llama", "", text("llama.rope.scaling.type", "linear"),
       "'llama.rope.scaling.type': wanted one of none, yarn"},
      {"llama", "", f32("llama.rope.scaling.factor", 4), "'llama.rope.scaling.factor'"},
      {"llama", "", f32("llama.attention.clamp_kqv", 8),
       "key 'llama.attention.clamp_kqv' is unknown to model_type 'llama'"},
      {"llama", "",
       [](GgufWriter& w) {
         w.array("llama.rope.dimension_sections", GgufValueType::kU32, 1, number_bytes(8u));
       },
       "key 'llama.rope.dimension_sections' is unknown"},
      {"llama", "", f32("llama.logit_scale", 0.5f), "key 'llama.logit_scale' is unknown"},
      {"llama", "", u32("llama.attention.sliding_window", 512),
       "key 'llama.attention.sliding_window' is unknown"},
      {"llama", "llama.rope.dimension_count", u32("llama.rope.dimension_count", 33),
       "'llama.rope.dimension_count': wanted"},
      {"llama", "tokenizer.ggml.eos_token_id", u32("tokenizer.ggml.eos_token_id", 384),
       "'tokenizer.ggml.eos_token_id'"},
      {"laguna", "laguna.expert_gating_func", u32("laguna.expert_gating_func", 1),
       "'laguna.expert_gating_func': wanted 2 (sigmoid), 4 (sqrtsoftplus)"},
      {"laguna", "laguna.expert_weights_norm",
       [](GgufWriter& w) { w.boolean("laguna.expert_weights_norm", false); },
       "key 'laguna.expert_weights_norm' = false is not implemented"},
      {"laguna", "laguna.rope.scaling.yarn_attn_factor", f32("laguna.rope.scaling.yarn_attn_factor", 1.5f),
       "'laguna.rope.scaling.yarn_attn_factor': wanted 1 or 1.20794"},
      {"laguna", "laguna.rope.scaling.yarn_ext_factor", f32("laguna.rope.scaling.yarn_ext_factor", 0.5f),
       "'laguna.rope.scaling.yarn_ext_factor': wanted 1"},
      {"laguna", "laguna.attention.sliding_window_pattern",
       [](GgufWriter& w) {
         w.array("laguna.attention.sliding_window_pattern", GgufValueType::kBool, 2, std::string("\0\1", 2));
       },
       "'laguna.attention.sliding_window_pattern': wanted one boolean for each of 5 layers"},
      {"laguna", "laguna.leading_dense_block_count", u32("laguna.leading_dense_block_count", 9),
       "'laguna.leading_dense_block_count': wanted"},
      {"glm4moe", "glm4moe.nextn_predict_layers", u32("glm4moe.nextn_predict_layers", 5),
       "'glm4moe.nextn_predict_layers': wanted fewer than the 5 layers"},
      {"glm4moe", "glm4moe.expert_gating_func", u32("glm4moe.expert_gating_func", 1),
       "'glm4moe.expert_gating_func': wanted 2 (sigmoid)"},
      {"glm4moe", "glm4moe.expert_count", u32("glm4moe.expert_count", 2), "'glm4moe.expert_used_count' = 4"},
      {"gpt-oss", "", u32("gpt-oss.expert_gating_func", 1), "'gpt-oss.expert_gating_func': wanted 3"},
      {"gpt-oss", "gpt-oss.rope.scaling.factor", nullptr, "'gpt-oss.rope.scaling.factor' is missing"},
      {"qwen3moe", "", f32("qwen3moe.expert_weights_scale", 2), "'qwen3moe.expert_weights_scale' is unknown"},
      {"qwen3", "", f32("qwen3.final_logit_softcapping", 30), "'qwen3.final_logit_softcapping' is unknown"},
  };
  const std::vector<Family> all = families();
  for (const Refused& row : table) {
    const auto family = std::find_if(all.begin(), all.end(),
                                     [&](const Family& f) { return std::string(f.arch) == row.arch; });
    ASSERT_NE(family, all.end());
    GgufWriter writer;
    family->metadata(writer);
    if (row.replace) row.replace(writer);
    // The first of two equal keys is the family's own.
    const std::string bytes =
        std::string(row.key).empty() ? writer.file() : without_key(writer.file(), row.key);
    FaultyFileSystem files;
    files.add_file("m.gguf", bytes);
    auto gguf = Gguf::open(files, "m.gguf");
    ASSERT_TRUE(gguf.ok()) << row.fragment << ": " << gguf.status().message();
    const auto spec = load_gguf_spec(*gguf);
    ASSERT_FALSE(spec.ok()) << row.fragment;
    EXPECT_NE(spec.status().message().find(row.fragment), std::string::npos)
        << row.fragment << " wanted, found: " << spec.status().message();
    EXPECT_EQ(spec.status().message().find("m.gguf: "), 0u) << spec.status().message();
    EXPECT_EQ(spec.status().code(), ErrorCode::kUser);
  }
}

// Tensors that are not as the metadata says.
TEST(GgufWeights, WrongTensorsAreNamed) {
  const std::vector<Family> all = families();
  const Family& family = all.back();
  ASSERT_STREQ(family.arch, "llama");
  const ModelSpec spec = spec_of_text(config_of(family));
  auto ops = make_backend("reference", {.threads = 1}).value();
  Recorder recorder;
  ASSERT_TRUE(load_weights(spec, recorder, *ops).ok());
  const auto load = [&](const std::function<void(RecordedTensors&)>& change, const Edit& edit = {}) {
    RecordedTensors tensors = recorder.tensors;
    change(tensors);
    GgufWriter writer;
    family.metadata(writer);
    add_tensors(writer, tensors, family.ffn_norm, Packing::kF32);
    if (edit) edit(writer);
    const std::shared_ptr<Gguf> gguf = open_gguf(writer);
    GgufWeights weights(gguf, load_gguf_spec(*gguf).value());
    return load_weights(load_gguf_spec(*gguf).value(), weights, *ops).status().message();
  };
  const auto keep = [](RecordedTensors&) {};
  EXPECT_EQ(load(keep), "");
  EXPECT_NE(load([](RecordedTensors& t) {
              t.erase("model.layers.1.self_attn.v_proj.weight");
            }).find("m.gguf: tensor 'blk.1.attn_v.weight': is missing"),
            std::string::npos);
  EXPECT_NE(
      load([](RecordedTensors& t) { t["model.norm.weight"].shape = {127}; }).find("'output_norm.weight'"),
      std::string::npos);
  EXPECT_NE(load(keep, [](GgufWriter& w) { w.tensor("blk.0.surprise", {1}, kGgufF32, "abcd"); })
                .find("tensors unknown to model_type 'llama': blk.0.surprise"),
            std::string::npos);
  EXPECT_NE(load([](RecordedTensors& t) { t.erase("model.layers.1.mlp.up_proj.weight"); },
                 [](GgufWriter& w) {
                   std::string blocks;
                   for (int i = 0; i < 256 * 4; ++i) {
                     blocks += i == 4 * 17 + 2 ? std::string("\x00\x7C", 2) : std::string("\x00\x3C", 2);
                     blocks += std::string(32, '\1');
                   }
                   w.tensor("blk.1.ffn_up.weight", {128, 256}, 8, blocks);
                 })
                .find("m.gguf: tensor 'blk.1.ffn_up.weight': the scale of row 17, columns from 64 is NaN"),
            std::string::npos);
  EXPECT_NE(load(keep,
                 [](GgufWriter& w) {
                   w.tensor("rope_freqs.weight", {16}, kGgufF32, bytes_of(std::vector<float>(16, 0)));
                 })
                .find("'rope_freqs.weight': wanted values above 0"),
            std::string::npos);
}

}  // namespace
}  // namespace nibble
