#include "text/utf8.h"

#include "base/check.h"

namespace nibble {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

enum class Form { kWhole, kInvalid, kUnfinished };

// What `bytes` begins with: a whole character, a maximal invalid subpart, or a start that the end cuts off.
struct Scan {
  Form form;
  size_t size_bytes;
};

// Table 3-7 of the Unicode standard: the lead byte gives the length and the range of the second byte; every
// further byte is 80..BF.
Scan scan_character(std::string_view bytes) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  unsigned char lead = byte(0);
  if (lead < 0x80) return {Form::kWhole, 1};
  size_t length = 0;
  unsigned char low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    if (lead == 0xE0) low = 0xA0;   // shorter forms exist
    if (lead == 0xED) high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // past U+10FFFF
  } else {
    return {Form::kInvalid, 1};
  }
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Form::kUnfinished, i};
    if (byte(i) < low || byte(i) > high) return {Form::kInvalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {Form::kWhole, length};
}

// Appends the repaired `bytes` up to an unfinished character at the end, and gives how many bytes that was.
size_t repair_whole(std::string_view bytes, std::string& out) {
  size_t at = 0;
  while (at < bytes.size()) {
    Scan scan = scan_character(bytes.substr(at));
    if (scan.form == Form::kUnfinished) break;
    if (scan.form == Form::kWhole) {
      out.append(bytes, at, scan.size_bytes);
    } else {
      out.append(kReplacement);
    }
    at += scan.size_bytes;
  }
  return at;
}

}  // namespace

std::string repair_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  if (repair_whole(bytes, out) < bytes.size()) out.append(kReplacement);
  return out;
}

Utf8Character first_character(std::string_view text) {
  NIBBLE_DCHECK(!text.empty());
  auto bits = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[i]) & 0x3F); };
  auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1FU) << 6 | bits(1), 2};
  if (lead < 0xF0) return {(lead & 0x0FU) << 12 | bits(1) << 6 | bits(2), 3};
  return {(lead & 0x07U) << 18 | bits(1) << 12 | bits(2) << 6 | bits(3), 4};
}

Utf8Character last_character(std::string_view text) {
  NIBBLE_DCHECK(!text.empty());
  size_t start = text.size() - 1;
  while ((static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return first_character(text.substr(start));
}

void append_utf8(char32_t code, std::string& out) {
  auto put = [&](char32_t byte) { out.push_back(static_cast<char>(byte)); };
  auto tail = [&](int shift) { put(0x80 | (code >> shift & 0x3F)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xC0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    put(0xE0 | code >> 12);
    tail(6);
    tail(0);
  } else {
    put(0xF0 | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

std::string Utf8Stream::push(std::string_view bytes) {
  pending_.append(bytes);
  std::string out;
  pending_.erase(0, repair_whole(pending_, out));
  return out;
}

std::string Utf8Stream::finish() {
  std::string out;
  if (!pending_.empty()) out = kReplacement;
  pending_.clear();
  return out;
}

}  // namespace nibble
