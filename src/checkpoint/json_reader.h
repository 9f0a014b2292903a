// The events of one JSON document, without a tree: no recursion and no memory for what nobody keeps, however
// deep or large the document is; duplicate keys reach the reader, which a tree would silently merge.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/result.h"

namespace nibble {

// A reader overrides the events that it understands and answers the rest with fail() in unexpected().
class JsonReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Feeds `text` to the events; the first failed event or syntax error ends it. Messages do not name the
  // file.
  Status read(std::string_view text) {
    nlohmann::json_sax<nlohmann::json>* events = this;
    if (!nlohmann::json::sax_parse(text.begin(), text.end(), events) && error_.ok())
      error_ = user_error("is not valid JSON");
    return error_;
  }

 protected:
  // A value that has no place here; `what` is "a string", "an array" ...
  virtual bool unexpected(std::string_view what) = 0;

  bool fail(Status error) {
    error_ = std::move(error);
    return false;
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(int64_t) override { return unexpected("a negative number"); }
  bool number_unsigned(uint64_t) override { return unexpected("a number"); }
  bool number_float(double, const std::string&) override {
    return unexpected("a fraction or too large a number");
  }
  bool string(std::string&) override { return unexpected("a string"); }
  bool binary(nlohmann::json::binary_t&) override { return unexpected("binary data"); }
  bool start_object(size_t) override { return unexpected("an object"); }
  bool start_array(size_t) override { return unexpected("an array"); }
  bool end_array() override { return true; }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return fail(user_error("is not valid JSON (error at byte {} of it)", position));
  }

 private:
  Status error_;
};

}  // namespace nibble
