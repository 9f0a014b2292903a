// GGUF to a model: the same logits as the same weights give in safetensors, for each architecture; and what
// is refused.
#include <gtest/gtest.h>

#include <cmath>

#include "golden_file.h"
#include "model/gguf_families.h"
#include "model/test_model.h"

namespace nibble {
namespace {

class GgufModel : public testing::TestWithParam<Family> {
 protected:
  GgufModel() : config_(config_of(GetParam())), spec_(spec_of_text(config_)) {
    tensors_ = recorded(GetParam(), spec_, source_);
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
    auto weights = std::make_unique<GgufWeights>(gguf, *spec);
    for (const StoredTensor& tensor : weights->stored()) {
      EXPECT_TRUE(tensor.matrix && matrix_format_name(*tensor.matrix).ends_with(tensor.format))
          << tensor.name;
      int layer = -1;  // none that nobody reads: the memory plan counts what is here
      std::sscanf(tensor.name.c_str(), "blk.%d.", &layer);
      EXPECT_LT(layer, std::ssize(spec->layers)) << tensor.name;
    }
    return logits(std::move(weights), *spec, backend);
  }

  std::string config_;
  ModelSpec spec_;
  std::unique_ptr<WeightSource> source_;
  RecordedTensors tensors_;
  std::vector<int32_t> ids_;
};

class PackedGgufModel : public GgufModel {};
class LlamaGgufModel : public GgufModel {};
class Nvfp4GgufModel : public GgufModel {};

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
  if (is_llama(GetParam())) {
    tensors = interleaved(tensors_, 32);
    spec = spec_of_text(config_.substr(0, config_.rfind('}')) + R"(, "rope_interleaved": true})");
  }
  for (const char* backend : {"reference", "cpu"}) {
    const std::vector<float> wanted = safetensors_logits(tensors, spec, backend);
    EXPECT_TRUE(gguf_logits(tensors, Packing::kF32, backend) == wanted) << backend;
    if (is_llama(GetParam())) {
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

// What calibration gave the rows that go into experts is there too.
TEST_P(Nvfp4GgufModel, StaticActivationScalesAreThoseOfTheCheckpoint) {
  const DecoderOptions w4a4 = options_for(70, 1, 1024, {.w4a4 = true, .act_scale = ActScale::kStatic});
  GgufWriter writer;
  GetParam().metadata(writer);
  add_tensors(writer, tensors_, GetParam().ffn_norm, Packing::kAsStored);
  const std::shared_ptr<Gguf> gguf = open_gguf(writer);
  const ModelSpec spec = load_gguf_spec(*gguf).value();
  TestModel found = load_test_model(std::make_unique<GgufWeights>(gguf, spec), spec, "reference", w4a4);
  TestModel golden = load_test_model(golden_directory(GetParam().golden), "reference", w4a4);
  EXPECT_TRUE(found.logits(ids_, ids_.size()) == golden.logits(ids_, ids_.size()));
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

INSTANTIATE_TEST_SUITE_P(Architectures, GgufModel, testing::ValuesIn(families()), name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, PackedGgufModel, testing::ValuesIn(families_that([](const Family& f) {
                           return f.golden != nullptr && !is_llama(f);
                         })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, Nvfp4GgufModel, testing::ValuesIn(families_that([](const Family& f) {
                           return f.golden != nullptr && std::string(f.golden).ends_with("-nvfp4") &&
                                  !is_llama(f);
                         })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, LlamaGgufModel, testing::ValuesIn(families_that(is_llama)), name_of);

// Metadata that says other things than we implement, in place of the family's own key or beside its keys.
struct Refused {
  const char* arch;
  const char* key;  // the family's, which is left out; empty: none
  Edit replace;
  const char* fragment;  // of the message
};

// The file with a key under another name: its first, which is the family's, where two are written.
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
       "'llama.rope.dimension_count': wanted 32, a whole head"},
      // Which rows of q and k a writer has moved is not known.
      {"llama", "llama.rope.dimension_count", u32("llama.rope.dimension_count", 16),
       "'llama.rope.dimension_count': wanted 32, a whole head"},
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
    const auto family = std::find_if(all.rbegin(), all.rend(),
                                     [&](const Family& f) { return std::string(f.arch) == row.arch; });
    ASSERT_NE(family, all.rend());
    GgufWriter writer;
    family->metadata(writer);
    if (row.replace) row.replace(writer);
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

// Keys of sliding layers where none slides.
TEST(GgufConfig, LagunaWithoutAWindow) {
  const Family laguna = families().front();
  GgufWriter writer;
  laguna.metadata(writer);
  FaultyFileSystem files;
  files.add_file("m.gguf", without_key(writer.file(), "laguna.attention.sliding_window"));
  const auto gguf = Gguf::open(files, "m.gguf");
  ASSERT_TRUE(gguf.ok()) << gguf.status().message();
  const auto spec = load_gguf_spec(*gguf);
  ASSERT_TRUE(spec.ok()) << spec.status().message();
  for (const LayerSpec& layer : spec->layers) EXPECT_EQ(std::get<GqaSpec>(layer.mixer).window, 0);
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
