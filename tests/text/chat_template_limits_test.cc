// A template is untrusted input: whatever it does, it ends soon, in bounded memory, with one clear line.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "text/chat_template.h"

namespace nibble {
namespace {

using nlohmann::ordered_json;

std::string repeat(const std::string& text, int count) {
  std::string out;
  for (int i = 0; i < count; ++i) out += text;
  return out;
}

Result<std::string> render(const std::string& source, const ordered_json& context = ordered_json::object(),
                           const TemplateLimits& limits = {}) {
  auto parsed = ChatTemplate::parse(source, "t", limits);
  if (!parsed.ok()) return parsed.status();
  return parsed->render(context);
}

struct Attack {
  std::string name, source, words;  // words: a part of the message
};
void PrintTo(const Attack& attack, std::ostream* out) { *out << attack.name; }

class Limits : public testing::TestWithParam<Attack> {};

TEST_P(Limits, EndWithOneLine) {
  const auto out = render(GetParam().source);
  ASSERT_FALSE(out.ok()) << "gave " << out->size() << " bytes";
  const std::string& message = out.status().message();
  EXPECT_NE(message.find(GetParam().words), std::string::npos) << message.substr(0, 300);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), 300U);
}

INSTANTIATE_TEST_SUITE_P(
    Parser, Limits,
    testing::ValuesIn(std::vector<Attack>{
        {"parentheses", "{{ " + repeat("(", 60'000) + "1" + repeat(")", 60'000) + " }}",
         "nested deeper than 200"},
        {"open parentheses", "{{ " + repeat("(", 60'000), "nested deeper than 200"},
        {"lists", "{{ " + repeat("[", 60'000) + repeat("]", 60'000) + " }}", "nested deeper than 200"},
        {"dicts", "{{ " + repeat("{1:", 60'000) + "1" + repeat("}", 60'000) + " }}",
         "nested deeper than 200"},
        {"nots", "{{ " + repeat("not ", 60'000) + "1 }}", "nested deeper than 200"},
        {"signs", "{{ " + repeat("-", 60'000) + "1 }}", "nested deeper than 200"},
        {"attributes", "{{ a" + repeat(".b", 60'000) + " }}", "nested deeper than 200"},
        {"calls", "{{ a" + repeat("()", 60'000) + " }}", "nested deeper than 200"},
        {"subscripts", "{{ a" + repeat("[0]", 60'000) + " }}", "nested deeper than 200"},
        {"nested subscripts", "{{ " + repeat("a[", 60'000) + repeat("]", 60'000) + " }}",
         "nested deeper than 200"},
        {"filters", "{{ a" + repeat("|upper", 60'000) + " }}", "nested deeper than 200"},
        {"sums", "{{ 1" + repeat(" + 1", 60'000) + " }}", "nested deeper than 200"},
        {"powers", "{{ 1" + repeat(" ** 1", 60'000) + " }}", "nested deeper than 200"},
        {"ands", "{{ 1" + repeat(" and 1", 60'000) + " }}", "nested deeper than 200"},
        {"inline ifs", "{{ 1" + repeat(" if 1 else 1", 60'000) + " }}", "nested deeper than 200"},
        {"inline ifs without else", "{{ 1" + repeat(" if 1", 60'000) + " }}", "nested deeper than 200"},
        {"ifs", repeat("{% if 1 %}", 60'000), "nested deeper than 200"},
        {"fors", repeat("{% for x in y %}", 60'000), "nested deeper than 200"},
        {"macros", repeat("{% macro m() %}", 60'000), "nested deeper than 200"},
        {"targets", "{% set " + repeat("(", 60'000) + "a" + repeat(")", 60'000) + " = 1 %}",
         "nested deeper than 200"},
        {"source", std::string((1 << 20) + 1, 'x'), "the limit is 1048576"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Renderer, Limits,
    testing::ValuesIn(std::vector<Attack>{
        {"macro recursion", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deep"},
        {"two macros",
         "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
         "nested too deep"},
        {"caller recursion",
         "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
         "nested too deep"},
        {"deep list",
         "{% set ns = namespace(x=[]) %}{% for i in range(3000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x "
         "}}",
         "nested too deep"},
        {"deep list as JSON",
         "{% set ns = namespace(x=[]) %}{% for i in range(3000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ "
         "ns.x|tojson }}",
         "nested too deep"},
        {"deep lists compared",
         "{% set a = namespace(x=[]) %}{% set b = namespace(x=[]) %}{% for i in range(3000) %}{% set a.x = "
         "[a.x] %}"
         "{% set b.x = [b.x] %}{% endfor %}{{ a.x == b.x }}",
         "nested too deep"},
        {"deep tuple as key",
         "{% set a = namespace(x=()) %}{% for i in range(3000) %}{% set a.x = (a.x,) %}{% endfor %}{{ {a.x: "
         "1} }}",
         "nested too deep"},
        {"range", "{% for i in range(10**9) %}{% endfor %}", "more than 100000 items"},
        {"nested loops", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         "2000000 steps"},
        {"loop without end",
         "{% macro m() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
         "{% endfor %}{% endmacro %}{{ m() }}",
         "2000000 steps"},
        {"nested iterators",
         "{% for i in range(99999)|map('string')|select('in', range(99999)|list) %}{% endfor %}", "steps"},
        {"string times", "{{ 'a' * 10**9 }}", "longer than 16777216 bytes"},
        {"list times", "{{ ([1] * 10**9)|length }}", "more than 268435456 bytes"},
        {"doubling",
         "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
         "bytes"},
        {"doubling with +",
         "{% set ns = namespace(x='a') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
         "steps"},
        {"doubling lists",
         "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
         "more than 268435456 bytes"},
        {"printing shared lists",
         "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ "
         "ns.x }}",
         "steps"},
        {"comparing shared lists",
         "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(64) %}"
         "{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x }}",
         "steps"},
        {"hashing shared tuples",
         "{% set a = namespace(x=(1,)) %}{% for i in range(64) %}{% set a.x = (a.x, a.x) %}{% endfor %}{{ "
         "{a.x: 1} }}",
         "steps"},
        {"output", "{% set x = 'a' * 1000000 %}{% for i in range(99) %}{{ x }}{% endfor %}",
         "16777216 bytes"},
        {"captured output", "{% set y %}{% for i in range(99) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}",
         "bytes"},
        {"replace", "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}", "more than 16777216 bytes"},
        {"replace nothing", "{{ ('a' * 100000).replace('', 'b' * 100000) }}", "more than 16777216 bytes"},
        {"join", "{{ range(99999)|join('b' * 100000) }}", "more than 16777216 bytes"},
        {"indent", "{{ ('a\n' * 100000)|indent(100000) }}", "more than 16777216 bytes"},
        {"center", "{{ 'a'|center(10**9) }}", "too large"},
        {"zfill", "{{ 'a'.zfill(10**9) }}", "too large"},
        {"format width", "{{ '%999999999d' % 1 }}", "larger than 10000"},
        {"format precision", "{{ '%.999999999f' % 1 }}", "larger than 10000"},
        {"brace width", "{{ '{:999999999}'.format(1) }}", "larger than 10000"},
        {"batch", "{{ [1]|batch(10**9, 0)|list }}", "too long"},
        {"slice", "{{ [1]|slice(10**9)|list }}", "steps"},
        {"JSON indent", "{{ [1]|tojson(indent=10**9) }}", "too large"},
        {"time", "{{ strftime_now('%9999999d') }}", "longer than 4096 bytes"},
        {"power", "{{ 10 ** 10 ** 10 }}", "64 bits"},
    }));

TEST(ChatTemplateLimits, SelfReferencesPrintAndCompare) {
  const auto out = render(
      "{% set a = namespace() %}{% set b = namespace() %}{% set a.b = b %}{% set b.a = a %}{% set a.l = [a, "
      "[a]] %}"
      "{{ a == b }} {{ a == a }} {{ a in a.l }} {{ [a] == [a] }} {{ a }}");
  ASSERT_TRUE(out.ok()) << out.status().message();
  EXPECT_EQ(*out,
            "False True True True <Namespace {'b': <Namespace {'a': <Namespace {...}>}>, "
            "'l': [<Namespace {...}>, [<Namespace {...}>]]}>");
}

TEST(ChatTemplateLimits, DeepContext) {
  ordered_json deep = 1;
  for (int i = 0; i < 20'000; ++i) deep = ordered_json::array({std::move(deep)});
  ordered_json context;
  context["a"] = std::move(deep);
  const auto out = render("{{ a }}", context);
  ASSERT_FALSE(out.ok());
  EXPECT_NE(out.status().message().find("nested too deep"), std::string::npos);
  EXPECT_TRUE(render("{{ b }}", context).ok());  // nobody asked for it
}

TEST(ChatTemplateLimits, RealisticNestingIsFine) {
  ordered_json schema = {{"type", "string"}};
  for (int i = 0; i < 30; ++i) schema = {{"type", "object"}, {"inner", schema}};
  const auto out = render(
      "{% macro m(s) %}{% if s['inner'] %}{% for k in [1] %}{{- '[' + m(s['inner']) + ']' -}}{% endfor %}"
      "{% else %}{{ s.type }}{% endif %}{% endmacro %}{{ m(s) }}",
      {{"s", schema}});
  ASSERT_TRUE(out.ok()) << out.status().message();
  EXPECT_EQ(*out, std::string(30, '[') + "string" + std::string(30, ']'));
}

TEST(ChatTemplateLimits, LongElifChainsAreFlat) {
  std::string source = "{% if a == 0 %}0";
  for (int i = 1; i < 2000; ++i) source += "{% elif a == " + std::to_string(i) + " %}" + std::to_string(i);
  EXPECT_EQ(*render(source + "{% endif %}", {{"a", 1999}}), "1999");
}

TEST(ChatTemplateLimits, AreTheCallers) {
  TemplateLimits limits;
  limits.max_output_bytes = 10;
  EXPECT_TRUE(render("0123456789", ordered_json::object(), limits).ok());
  EXPECT_FALSE(render("0123456789a", ordered_json::object(), limits).ok());
  limits = {};
  limits.max_depth = 5;
  EXPECT_TRUE(render("{{ [[1]] }}", ordered_json::object(), limits).ok());
  EXPECT_FALSE(render("{{ [[[[[1]]]]] }}", ordered_json::object(), limits).ok());
  limits = {};
  limits.max_steps = 100;
  EXPECT_FALSE(render("{% for i in range(99) %}{% endfor %}", ordered_json::object(), limits).ok());
}

}  // namespace
}  // namespace nibble
