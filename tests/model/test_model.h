// A model directory, loaded and ready to step; fails the test where it cannot be.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "model/decoder.h"
#include "ops/backend.h"
#include "places.h"
#include "quant/float_codes.h"

namespace nibble {

struct TestModel {
  std::unique_ptr<Ops> ops;
  std::unique_ptr<WeightSource> weights;
  std::unique_ptr<Decoder> decoder;
  std::vector<Buffer> rounded_inv_freq;

  const ModelSpec& spec() const { return decoder->spec(); }

  int32_t add_sequence() { return decoder->kv().add_sequence().value(); }

  // Logits [T, V] of all ids, fed in chunks of `chunk` to a new sequence.
  std::vector<float> logits(const std::vector<int32_t>& ids, size_t chunk) {
    int32_t slot = add_sequence();
    std::vector<float> all;
    for (size_t at = 0; at < ids.size(); at += chunk) {
      SequenceStep step{slot, std::span(ids).subspan(at, std::min(chunk, ids.size() - at)), WantLogits::kAll};
      auto rows = decoder->forward(std::span(&step, 1));
      EXPECT_TRUE(rows.ok()) << rows.status().message();
      all.insert(all.end(), rows->data, rows->data + rows->rows * rows->cols);
    }
    decoder->kv().remove_sequence(slot);
    return all;
  }
};

// bf16_rope: with RoPE frequencies rounded to bfloat16.
inline TestModel load_test_model(std::unique_ptr<WeightSource> source, const ModelSpec& spec,
                                 const std::string& backend, DecoderOptions options,
                                 const BackendOptions& backend_options = {}, bool bf16_rope = false) {
  TestModel model;
  auto ops = make_backend(backend, backend_options);
  EXPECT_TRUE(ops.ok()) << ops.status().message();
  model.ops = std::move(ops).value();
  model.weights = std::move(source);
  auto weights = load_weights(spec, *model.weights, *model.ops, options.arithmetic);
  EXPECT_TRUE(weights.ok()) << weights.status().message();
  if (bf16_rope) {
    for (std::span<const float>& inv_freq : weights->rope_inv_freq) {
      Memory& memory = model.ops->memory();
      std::vector<float> rounded(inv_freq.size());
      const auto bytes = static_cast<int64_t>(inv_freq.size_bytes());
      memory.download(rounded.data(), inv_freq.data(), bytes);
      for (float& f : rounded) f = bf16_to_float(float_to_bf16(f));
      model.rounded_inv_freq.push_back(Buffer::allocate(memory, bytes, "rounded frequencies").value());
      memory.upload(model.rounded_inv_freq.back().as<float>(), rounded.data(), bytes);
      inv_freq = {model.rounded_inv_freq.back().as<const float>(), rounded.size()};
    }
  }
  auto decoder = Decoder::create(*model.ops, spec, std::move(weights).value(), options);
  EXPECT_TRUE(decoder.ok()) << decoder.status().message();
  model.decoder = std::move(decoder).value();
  return model;
}

inline TestModel load_test_model(const std::string& directory, const std::string& backend,
                                 DecoderOptions options, const BackendOptions& backend_options = {},
                                 bool bf16_rope = false) {
  auto spec = load_spec(FileSystem::posix(), directory);
  EXPECT_TRUE(spec.ok()) << spec.status().message();
  auto checkpoint = Checkpoint::open(FileSystem::posix(), directory);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  return load_test_model(std::make_unique<Checkpoint>(std::move(checkpoint).value()), *spec, backend, options,
                         backend_options, bf16_rope);
}

inline DecoderOptions options_for(int64_t rows, int64_t sequences = 1, int64_t tokens = 1024,
                                  const ExpertArithmetic& arithmetic = {}) {
  return {.kv = {.max_sequences = sequences, .max_tokens = tokens, .max_new_tokens = rows},
          .max_rows = rows * sequences,
          .max_logit_rows = rows * sequences,
          .arithmetic = arithmetic};
}

}  // namespace nibble
