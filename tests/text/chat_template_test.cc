// Small templates and what they give. Every expected text is what jinja2 3.1.6 gives, configured as
// transformers does it; tests/python/chat_template_test.py compares many more with jinja2 itself.
#include "text/chat_template.h"

#include <gtest/gtest.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

namespace nibble {
namespace {

using nlohmann::ordered_json;

const char* const kContext = R"json({
  "i": 7, "f": 2.5, "s": "Hello, Wörld", "l": [3, 1, 2], "d": {"a": 1, "b": [1, 2]}, "n": null, "t": true,
  "u": "日本語😀", "rows": [{"name": "x", "v": 3}, {"name": "Y", "v": 1}, {"name": "y"}], "q": "it's \"q\"\n"
})json";

Result<std::string> render(const std::string& source) {
  auto parsed = ChatTemplate::parse(source, "t.jinja");
  if (!parsed.ok()) return parsed.status();
  std::tm now{};
  const std::time_t seconds = 1722000000;
  gmtime_r(&seconds, &now);
  return parsed->render(ordered_json::parse(kContext), &now);
}

struct Row {
  std::string source, expected;
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.source; }

class Renders : public testing::TestWithParam<Row> {};

TEST_P(Renders, AsJinja2) {
  const auto out = render(GetParam().source);
  ASSERT_TRUE(out.ok()) << out.status().message();
  EXPECT_EQ(*out, GetParam().expected);
}

INSTANTIATE_TEST_SUITE_P(Text, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"plain", "plain"},
                             {"", ""},
                             {"a\n", "a"},
                             {"a\n\n", "a\n"},
                             {"{{ i }}\n", "7"},
                             {"a{# c #}b", "ab"},
                             {"a{#- c -#} b", "ab"},
                             {"  {# c #}\nx", "x"},
                             {"{% raw %}{{ i }}{% endraw %}", "{{ i }}"},
                             {"  {% raw -%}  {% x %}  {%- endraw %}\n!", "{% x %}!"},
                             {"x\r\ny\rz", "x\ny\nz"},
                         }));

INSTANTIATE_TEST_SUITE_P(WhiteSpace, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"a\n  {% if t %}\n  b\n  {% endif %}\nc", "a\n  b\nc"},
                             {"a {%- if t -%} b {%- endif -%} c", "abc"},
                             {"a\n  {%+ if t +%}\n b{% endif %}", "a\n  \n b"},
                             {"  {{ i }}\n  x", "  7\n  x"},
                             {" a {{- i -}} b ", " a7b "},
                             {"{% if t %}\n\nx{% endif %}", "\nx"},
                             {"\n  {#- c #}\n x", " x"},
                             {"{% for x in l %}\n  {{ x }}\n{% endfor %}\nend", "  3\n  1\n  2\nend"},
                             {"a  {% set x = 1 %}  b", "a    b"},
                         }));

INSTANTIATE_TEST_SUITE_P(Literals, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"{{ 'a' 'b' \"c\" }}", "abc"},
                             {"{{ 'a\\n\\x41\\u00e9\\101\\q' }}", "a\nAéA\\q"},
                             {"{{ 0x1F }} {{ 0b11 }} {{ 0o17 }} {{ 1_000 }}", "31 3 15 1000"},
                             {"{{ 1.5e3 }} {{ 1e16 }} {{ 1e-5 }} {{ 0.1 }} {{ 100.0 }}",
                              "1500.0 1e+16 1e-05 0.1 100.0"},
                             {"{{ true }} {{ None }} {{ False }}", "True None False"},
                             {"{{ [1, 'a', (2,), {}] }}", "[1, 'a', (2,), {}]"},
                             {"{{ {'a': 1, 2: none}['a'] }}", "1"},
                             {"{{ () }} {{ (1) }} {{ (1,) }}", "() 1 (1,)"},
                             {"{{ [1, 2,] }}{{ {'a': 1,} }}", "[1, 2]{'a': 1}"},
                         }));

INSTANTIATE_TEST_SUITE_P(Operators, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % -3 }} {{ -7 % 3 }}", "3 -4 -2 2"},
                             {"{{ 7 / 2 }} {{ 4 / 2 }}", "3.5 2.0"},
                             {"{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 3 ** 2 }}", "1024 0.5 64"},
                             {"{{ -2 ** 2 }}", "4"},
                             {"{{ 7.5 // 2 }} {{ -7.5 % 2 }}", "3.0 0.5"},
                             {"{{ 'a' ~ 1 ~ none }}", "a1None"},
                             {"{{ 'ab' * 2 }} {{ [1] * 2 }} {{ 2 * 'x' }}", "abab [1, 1] xx"},
                             {"{{ [1] + [2] }} {{ (1,) + (2,) }}", "[1, 2] (1, 2)"},
                             {"{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }}", "True False"},
                             {"{{ 1 == 1.0 == true }}", "True"},
                             {"{{ 'a' in 'abc' }} {{ 4 not in l }} {{ 'a' in d }}", "True True True"},
                             {"{{ n or 'x' }} {{ i and 0 }} {{ not n }}", "x 0 True"},
                             {"{{ 'y' if t else 'n' }}{{ 'y' if n }}", "y"},
                             {"{{ '%s-%d' % ('a', 3) }} {{ '%5.1f|%-4s|%03d' % (f, 's', 7) }}",
                              "a-3   2.5|s   |007"},
                             {"{{ [1, 2] < [1, 3] }} {{ 'a' < 'b' }}", "True True"},
                             {"{{ t + 1 }} {{ -t }}", "2 -1"},
                         }));

INSTANTIATE_TEST_SUITE_P(Subscripts, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"{{ l[0] }}{{ l[-1] }}{{ l[9] }}", "32"},
                             {"{{ s[1:4] }} {{ s[::-1] }} {{ s[-3:] }}", "ell dlröW ,olleH rld"},
                             {"{{ u[1] }} {{ u[::2] }} {{ u|length }}", "本 日語 4"},
                             {"{{ l[1:] }} {{ l[::-1] }} {{ l[5:] }}", "[1, 2] [2, 1, 3] []"},
                             {"{{ d.a }} {{ d['a'] }} {{ d.nope }}", "1 1 "},
                             {"{{ d['b'][1] }} {{ d.b.0 }}", "2 1"},
                             {"{{ d.items() }} {{ d.keys()|list }}",
                              "dict_items([('a', 1), ('b', [1, 2])]) ['a', 'b']"},
                             {"{{ d.get('a') }} {{ d.get('z') }} {{ d.get('z', 4) }}", "1 None 4"},
                             {"{{ 'abc'['upper']() }}", "ABC"},
                         }));

INSTANTIATE_TEST_SUITE_P(Undefined, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"[{{ nope }}]", "[]"},
                             {"{{ nope is defined }} {{ nope is undefined }}", "False True"},
                             {"{% for x in nope %}a{% else %}none{% endfor %}", "none"},
                             {"{{ nope ~ 'a' }} {{ nope|default('d') }} {{ nope|length }}", "a d 0"},
                             {"{{ nope == nope2 }} {{ not nope }}", "True True"},
                             {"{{ [nope] }}", "[Undefined]"},
                         }));

INSTANTIATE_TEST_SUITE_P(
    Statements, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{% for x in l %}{{ loop.index }}{{ loop.first }}{{ loop.last }};{% endfor %}",
         "1TrueFalse;2FalseFalse;3FalseTrue;"},
        {"{% for x in l %}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.index0 }}/{{ loop.length }} {% "
         "endfor %}",
         "320/3 211/3 102/3 "},
        {"{% for x in l %}{{ loop.previtem }}<{{ x }}<{{ loop.nextitem }} {% endfor %}", "<3<1 3<1<2 1<2< "},
        {"{% for x in l %}{{ loop.cycle('a', 'b') }}{% endfor %}", "aba"},
        {"{% for x in [1, 1, 2] %}{{ loop.changed(x) }}{% endfor %}", "TrueFalseTrue"},
        {"{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=[1, 2];"},
        {"{% for x in l if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}", "1:3/2 2:2/2 "},
        {"{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "32"},
        {"{% for x in l %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "3"},
        {"{% for x in l %}{% continue %}{% else %}else{% endfor %}", "else"},
        {"{% for c in u %}{{ c }},{% endfor %}", "日,本,語,😀,"},
        {"{% if n %}a{% elif i > 5 %}b{% else %}c{% endif %}", "b"},
        {"{% generation %}g{{ i }}{% endgeneration %}", "g7"},
        {"{% with a = 1, b = i %}{{ a }}{{ b }}{% endwith %}{{ a }}", "17"},
        {"{% filter upper %}a{{ s }}{% endfilter %}", "AHELLO, WÖRLD"},
        {"{% print i, 'x' %}", "7x"},
        {"{% for x in [[1, 2], [3, 4]] %}{% for y in x %}{{ loop.index }}{{ y }} {% endfor %}{{ loop.index "
         "}}{% endfor %}",
         "11 22 113 24 2"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Set, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{% set x = 1 %}{% for y in l %}{% set x = y %}{% endfor %}{{ x }}", "1"},
        {"{% set ns = namespace(x=1) %}{% for y in l %}{% set ns.x = y %}{% endfor %}{{ ns.x }}", "2"},
        {"{% set a, b = 1, 2 %}{{ a }}{{ b }}", "12"},
        {"{% set x %}a{{ i }}{% endset %}{{ x }}", "a7"},
        {"{% set x | upper | trim %} a {% endset %}[{{ x }}]", "[A]"},
        {"{% if t %}{% set x = 5 %}{% endif %}{{ x }}", "5"},
        {"{% set i = i + 1 %}{{ i }}", "8"},
        {"{% set ns = namespace(d, c=3) %}{{ ns.a }}{{ ns.c }}{{ ns.z }}", "13"},
        {"{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}", "<Namespace {'me': <Namespace {...}>}>"},
        {"{% set ns = namespace(l=[]) %}{% set ns.l = [ns.l, ns] %}{{ ns }}",
         "<Namespace {'l': [[], <Namespace {...}>]}>"},
        {"{% for x in l %}{% set i = i + x %}{{ i }} {% endfor %}{{ i }}", "10 8 9 7"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Macros, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{% macro m(a, b=2) %}{{ a }}-{{ b }}{% endmacro %}{{ m(1) }} {{ m(1, 3) }} {{ m(b=5, a=4) }} {{ "
         "m() }}",
         "1-2 1-3 4-5 -2"},
        {"{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}", "(1,){'x': 2}"},
        {"{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(3) }}", "3"},
        {"{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}x{% endcall %}", "[x]"},
        {"{% macro m() %}{{ caller(1, b=2) }}{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}",
         "12"},
        {"{% macro m() %}{{ x }}{% endmacro %}{% set x = 3 %}{{ m() }}", "3"},
        {"{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"},
        {"{% macro m() %}{% endmacro %}{{ m }} {{ m.name }} {{ m.arguments }}", "<Macro 'm'> m ()"},
        {"{% macro m(x) %}{{ x }}{% endmacro %}{{ m(*[1]) }}{{ m(**{'x': 2}) }}", "12"},
    }));

INSTANTIATE_TEST_SUITE_P(
    FiltersText, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ s|upper }} {{ s|lower }} {{ 'ab cd'|title }} {{ 'aBC'|capitalize }}",
         "HELLO, WÖRLD hello, wörld Ab Cd Abc"},
        {"{{ ' a '|trim }}|{{ 'xax'|trim('x') }}", "a|a"},
        {"{{ 'aaa'|replace('a', 'b', 2) }}", "bba"},
        {"{{ '<a&\"\\'>'|e }} {{ '<'|safe|e }} {{ '<'|e|forceescape }}",
         "&lt;a&amp;&#34;&#39;&gt; < &amp;lt;"},
        {"{{ 'a\nb\n\nc'|indent(2) }}", "a\n  b\n\n  c"},
        {"{{ 'a\nb'|indent('> ', true) }}", "> a\n> b"},
        {"{{ 'foo bar baz qux'|truncate(9) }} {{ 'foo bar baz qux'|truncate(9, true) }}", "foo... foo ba..."},
        {"{{ '%s %s'|format(1, 'x') }} {{ '%(a)s'|format(a=2) }}", "1 x 2"},
        {"{{ 'a b,c'|wordcount }} {{ 'a b/é?'|urlencode }} {{ {'a b': 1, 'c': '/'}|urlencode }}",
         "3 a%20b/%C3%A9%3F a+b=1&c=%2F"},
        {"{{ 'ab'|center(6) }}|", "  ab  |"},
        {"{{ 12|string ~ 'x' }} {{ s|list|first }}", "12x H"},
        {"{{ q|tojson }} {{ d|tojson }} {{ u|tojson }} {{ u|tojson(ensure_ascii=true) }}",
         "\"it's \\\"q\\\"\\n\" {\"a\": 1, \"b\": [1, 2]} \"日本語😀\" "
         "\"\\u65e5\\u672c\\u8a9e\\ud83d\\ude00\""},
        {"{{ d|tojson(indent=2) }}", "{\n  \"a\": 1,\n  \"b\": [\n    1,\n    2\n  ]\n}"},
        {"{{ {'b': 1, 'a': [1.0, none]}|tojson(sort_keys=true, separators=(',', ':')) }}",
         "{\"a\":[1.0,null],\"b\":1}"},
        {"{{ '<é>\\t\\x7f'|tojson }}", "\"<é>\\t\""},
        {"{{ (1, 2)|tojson }} {{ []|tojson(indent=1) }} {{ {1: true, none: 1.5}|tojson }}",
         "[1, 2] [] {\"1\": true, \"null\": 1.5}"},
    }));

INSTANTIATE_TEST_SUITE_P(
    FiltersNumbers, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ '42'|int }} {{ '4.7'|int }} {{ 'x'|int }} {{ 'x'|int(9) }} {{ 'ff'|int(0, 16) }} {{ 3.9|int }}",
         "42 4 0 9 255 3"},
        {"{{ '1.5'|float }} {{ 'x'|float }} {{ 2|float }}", "1.5 0.0 2.0"},
        {"{{ 2.5|round }} {{ 3.5|round }} {{ 42.55|round(1) }} {{ 1.21|round(1, 'ceil') }} {{ 5|round }}",
         "2.0 4.0 42.5 1.3 5"},
        {"{{ -3|abs }} {{ -1.5|abs }}", "3 1.5"},
        {"{{ l|sum }} {{ l|max }} {{ l|min }} {{ rows|sum(attribute='v', start=1) if false }}", "6 3 1 "},
    }));

INSTANTIATE_TEST_SUITE_P(
    FiltersSequence, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ l|sort }} {{ l|sort(reverse=true) }} {{ ['b', 'A']|sort }} {{ ['b', "
         "'A']|sort(case_sensitive=true) }}",
         "[1, 2, 3] [3, 2, 1] ['A', 'b'] ['A', 'b']"},
        {"{{ l|first }} {{ l|last }} {{ []|first }}", "3 2 "},
        {"{{ l|join }} {{ l|join(', ') }} {{ rows|join('-', attribute='name') }}", "312 3, 1, 2 x-Y-y"},
        {"{{ l|reverse|list }} {{ 'abc'|reverse }}", "[2, 1, 3] cba"},
        {"{{ ['a', 'A', 'b']|unique|list }}", "['a', 'b']"},
        {"{{ l|batch(2)|list }} {{ l|batch(2, 'x')|list }}", "[[3, 1], [2]] [[3, 1], [2, 'x']]"},
        {"{{ l|slice(2)|list }} {{ l|slice(2, 'x')|list }}", "[[3, 1], [2]] [[3, 1], [2, 'x']]"},
        {"{{ d|dictsort }} {{ d|items|list }}", "[('a', 1), ('b', [1, 2])] [('a', 1), ('b', [1, 2])]"},
        {"{{ rows|groupby('name')|list }}",
         "[('x', [{'name': 'x', 'v': 3}]), ('Y', [{'name': 'Y', 'v': 1}, {'name': 'y'}])]"},
        {"{% for g in rows|groupby('name') %}{{ g.grouper }}:{{ g.list|length }};{% endfor %}", "x:1;Y:2;"},
        {"{{ rows|map(attribute='name')|list }} {{ rows|map(attribute='v', default=0)|list }}",
         "['x', 'Y', 'y'] [3, 1, 0]"},
        {"{{ ['a', 'b']|map('upper')|list }} {{ ['a']|map('replace', 'a', 'z')|list }}", "['A', 'B'] ['z']"},
        {"{{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ [0, 1]|select|list }}", "[3, 1] [2] [1]"},
        {"{{ rows|selectattr('v')|list|length }} {{ rows|selectattr('v', 'defined')|rejectattr('v', 'eq', "
         "1)|map(attribute='name')|list }}",
         "2 ['x']"},
        {"{{ (1 if n)|default('d') }} {{ ''|default('d') }} {{ ''|d('d', true) }}", "d  d"},
        {"{{ d|attr('get')('a') }} {{ d|attr('a') is defined }}", "1 False"},
        {"{% set g = l|map('string') %}{{ g|list }}{{ g|list }}", "['3', '1', '2'][]"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Tests, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ 1 is odd }} {{ 2 is even }} {{ 4 is divisibleby 2 }} {{ 4 is divisibleby(3) }}",
         "True True True False"},
        {"{{ s is string }} {{ i is number }} {{ t is number }} {{ f is float }} {{ i is integer }} {{ t is "
         "integer }} {{ t is boolean }}",
         "True True True True True False True"},
        {"{{ d is mapping }} {{ l is sequence }} {{ s is sequence }} {{ d is iterable }} {{ i is iterable }}",
         "True True True True False"},
        {"{{ n is none }} {{ n is not none }} {{ t is true }} {{ t is false }} {{ n is sameas none }}",
         "True False True False True"},
        {"{{ 'a' is lower }} {{ 'A' is upper }} {{ 1 is eq 1 }} {{ 1 is ne 1 }} {{ 1 is lt 2 }} {{ 1 is "
         "ge(1) }} {{ 1 is in [1] }} {{ 'x' is equalto 'x' }}",
         "True True True False True True True True"},
        {"{{ range is callable }} {{ i is callable }} {{ 'upper' is filter }} {{ 'nope' is test }}",
         "True False True False"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Methods, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ ' a '.strip() }}|{{ 'xa'.lstrip('x') }}|{{ 'ax'.rstrip('x') }}", "a|a|a"},
        {"{{ 'a,b,c'.split(',') }} {{ 'a,b,c'.split(',', 1) }} {{ ' a  b '.split() }} {{ 'a b c'.rsplit(' ', "
         "1) }}",
         "['a', 'b', 'c'] ['a', 'b,c'] ['a', 'b'] ['a b', 'c']"},
        {"{{ 'a\nb\r\nc'.splitlines() }}", "['a', 'b', 'c']"},
        {"{{ s.startswith('He') }} {{ s.endswith(('x', 'd')) }}", "True True"},
        {"{{ 'aXa'.replace('a', 'b') }} {{ 'aa'.replace('a', 'b', 1) }}", "bXb ba"},
        {"{{ s.find('W') }} {{ s.rfind('l') }} {{ s.index('W') }} {{ s.count('l') }} {{ s.find('z') }}",
         "7 10 7 3 -1"},
        {"{{ '1'.isdigit() }} {{ 'a'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' '.isspace() }} {{ 'A'.isupper() "
         "}} {{ 'a'.islower() }}",
         "True True True True True True"},
        {"{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }}",
         "007 -007 bc ab"},
        {"{{ '{} {1}'.format(1) if false }}{{ '{} {}'.format(1, 'b') }} {{ '{a:>4}|{0!r}'.format('x', a=2) "
         "}}",
         "1 b    2|'x'"},
        {"{{ 'ab cd'.title() }} {{ 'STRASSE ß'.lower() }} {{ 'ß'.upper() }} {{ ','.join(['a', 'b']) }}",
         "Ab Cd strasse ß SS a,b"},
        {"{{ l.index(2) }} {{ l.count(1) }} {{ (1, 2).index(2) }}", "2 1 1"},
    }));

INSTANTIATE_TEST_SUITE_P(
    Globals, Renders,
    testing::ValuesIn(std::vector<Row>{
        {"{{ range(3)|list }} {{ range(1, 6, 2)|list }} {{ range(3) }} {{ range(3)[1] }}",
         "[0, 1, 2] [1, 3, 5] range(0, 3) 1"},
        {"{{ dict(a=1, b=2) }} {{ dict([('x', 1)]) }}", "{'a': 1, 'b': 2} {'x': 1}"},
        {"{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}", "1212"},
        {"{% set j = joiner(', ') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}", "3, 1, 2"},
        {"{{ strftime_now('%Y-%m-%d %H:%M') }}", "2024-07-26 13:20"},
    }));

INSTANTIATE_TEST_SUITE_P(Printing, Renders,
                         testing::ValuesIn(std::vector<Row>{
                             {"{{ q }}{{ [q] }}", "it's \"q\"\n['it\\'s \"q\"\\n']"},
                             {"{{ ['a\\\\b', \"it's\", '\\x00\\x7f', '\\u200b', 'é'] }}",
                              "['a\\\\b', \"it's\", '\\x00\\x7f', '\\u200b', 'é']"},
                             {"{{ [1.0, 1e100, -0.0, 1e22, 123456789.123] }}",
                              "[1.0, 1e+100, -0.0, 1e+22, 123456789.123]"},
                             {"{{ [true, none, (), {}] }}", "[True, None, (), {}]"},
                             {"{{ {'a': {'b': [1]}} }}", "{'a': {'b': [1]}}"},
                             {"{{ ['<'|e] }}", "[Markup('&lt;')]"},
                         }));

// What jinja2 refuses, too (but for the integers): the message names the template, the line and the thing.
struct Refusal {
  std::string source, message;
};
void PrintTo(const Refusal& row, std::ostream* out) { *out << row.source; }

class Refuses : public testing::TestWithParam<Refusal> {};

TEST_P(Refuses, WithNameAndLine) {
  const auto out = render("\n" + GetParam().source);
  ASSERT_FALSE(out.ok()) << *out;
  EXPECT_EQ(out.status().code(), ErrorCode::kUser);
  EXPECT_EQ(out.status().message(), "t.jinja:2: " + GetParam().message);
}

INSTANTIATE_TEST_SUITE_P(
    Errors, Refuses,
    testing::ValuesIn(std::vector<Refusal>{
        {"{{ 1 / 0 }}", "division by zero"},
        {"{{ 1 % 0 }}", "division by zero"},
        {"{{ nope.x }}", "'nope' is undefined"},
        {"{{ nope() }}", "'nope' is undefined"},
        {"{{ nope + 1 }}", "'nope' is undefined"},
        {"{{ 'a' + 1 }}", "unsupported operand types for +: 'str' and 'int'"},
        {"{{ l.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"},
        {"{{ d.update({}) }}", "access to attribute 'update' of 'dict' object is unsafe"},
        {"{{ 1 < 'a' }}", "'<' is not supported between 'int' and 'str'"},
        {"{{ none|length }}", "object of type 'NoneType' has no len()"},
        {"{% for x in 5 %}{% endfor %}", "'int' object is not iterable"},
        {"{% set a, b = [1] %}", "not enough values to unpack (expected 2, got 1)"},
        {"{% set i.x = 1 %}", "cannot assign an attribute of 'i': it is no namespace"},
        {"{{ {[]: 1} }}", "unhashable type: 'list'"},
        {"{{ 'abc'.index('z') }}", "substring not found"},
        {"{{ raise_exception('boom') }}", "boom"},
        {"{{ i() }}", "'int' object is not callable"},
        {"{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "macro 'm' takes not more than 1 argument(s)"},
        {"{% macro m(a) %}{% endmacro %}{{ m(z=1) }}", "macro 'm' takes no keyword argument 'z'"},
        {"{{ range(200000) }}", "a range of more than 100000 items"},
        {"{{ nope|tojson }}", "Object of type Undefined is not JSON serializable"},
        {"{{ 'a'|nosuch }}", "filter 'nosuch' is not implemented"},
        {"{{ 1 is nosuch }}", "test 'nosuch' is not implemented"},
        {"{% nosuch %}", "tag 'nosuch' is not implemented"},
        {"{% if %}", "expected an expression, got '%}'"},
        {"{% for x in l %}", "unexpected end of template, expected 'else'"},
        {"{% endfor %}", "unexpected tag 'endfor'"},
        {"{{ 'a }}", "unexpected char ': a string that does not end"},
        {"{{ (1 }}", "unexpected '}', expected ')'"},
        {"{# x", "missing end of comment tag"},
        {"{% raw %}x", "missing end of raw directive"},
        {"{{ a b }}", "expected '}}', got 'b'"},
        {"{% break %}", "'break' outside of a loop"},
        {"{% set true = 1 %}", "cannot assign to this expression"},
        {"{{ '%d' % 'x' }}", "%d format: a real number is required, not str"},
        {"{{ '%s %s' % 1 }}", "not enough arguments for format string"},
        {"{{ l[::0] }}", "slice step cannot be zero"},
        {"{% for x in l %}{% set loop = 1 %}{% endfor %}",
         "cannot assign to the special variable 'loop' inside a for"},
        {"{{ nope|int }}", "'nope' is undefined"},
        {"{{ [1, 'a']|sort }}", "'<' is not supported between 'str' and 'int'"},
        {"{{ '{'.format(1) }}", "expected '}' before end of string"},
        {"{{ 9223372036854775807 + 1 }}", "an integer does not fit 64 bits"},
        {"{{ -9223372036854775807 - 2 }}", "an integer does not fit 64 bits"},
        {"{{ 3037000500 * 3037000500 }}", "an integer does not fit 64 bits"},
        {"{{ 2 ** 63 }}", "an integer does not fit 64 bits"},
        {"{{ (-9223372036854775807 - 1) // -1 }}", "an integer does not fit 64 bits"},
        {"{{ 1e300|int }}", "an integer does not fit 64 bits"},
        {"{{ (-9223372036854775807 - 1)|abs }}", "an integer does not fit 64 bits"},
    }));

TEST(ChatTemplate, LineOfAnErrorInsideAMacro) {
  const auto out = render("{% macro m() %}\n\n{{ 1 / 0 }}{% endmacro %}\n\n{{ m() }}");
  ASSERT_FALSE(out.ok());
  EXPECT_EQ(out.status().message(), "t.jinja:3: division by zero");
}

TEST(ChatTemplate, UnknownFilterBelowAnIfIsRefusedOnlyWhenItRuns) {
  EXPECT_EQ(*render("{% if n %}{{ 'a'|nosuch }}{% endif %}x"), "x");
  EXPECT_FALSE(render("{% if t %}{{ 'a'|nosuch }}{% endif %}x").ok());
  EXPECT_FALSE(render("{% for x in [] %}{{ 'a'|nosuch }}{% endfor %}x").ok());
}

TEST(ChatTemplate, IsReusable) {
  auto parsed = ChatTemplate::parse("{% set ns = namespace(x=a) %}{{ ns.x }}", "t");
  ASSERT_TRUE(parsed.ok());
  EXPECT_EQ(*parsed->render({{"a", 1}}), "1");
  EXPECT_EQ(*parsed->render({{"a", "b"}}), "b");
}

TEST(ChatTemplate, RefusesBadUtf8AndBadContexts) {
  EXPECT_FALSE(ChatTemplate::parse("a\xff", "t").ok());
  auto parsed = ChatTemplate::parse("{{ a }}", "t");
  EXPECT_FALSE(parsed->render({{"a", "\xc3"}}).ok());
  EXPECT_FALSE(parsed->render(ordered_json::array()).ok());
  EXPECT_FALSE(parsed->render({{"a", UINT64_MAX}}).ok());
  EXPECT_EQ(*parsed->render({{"a", INT64_MIN}}), "-9223372036854775808");
}

}  // namespace
}  // namespace nibble
