"""src/text/chat_template.h against jinja2, configured as transformers' apply_chat_template does it.

The binary is NIBBLE_BUILD_DIR/tests/render_lines (default build/release). NIBBLE_TEMPLATE_SEED and
NIBBLE_TEMPLATE_COUNT change the random part.
"""

import copy
import datetime
import functools
import json
import os
import pathlib
import random
import subprocess
import tarfile

import jinja2
import jinja2.ext
import jinja2.sandbox
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("NIBBLE_BUILD_DIR", "build/release")
# In the manner of published models; they travel compressed, as the golden checkpoints do.
with tarfile.open(ROOT / "tests/data/templates.tar.xz") as archive:
    TEMPLATES = {pathlib.Path(file.name).stem: archive.extractfile(file).read().decode()
                 for file in archive.getmembers() if file.isfile()}
TEMPLATES["demo"] = (ROOT / "models/demo/chat_template.jinja").read_text()
NOW = 1722000000  # 2024-07-26
SEED = int(os.environ.get("NIBBLE_TEMPLATE_SEED", "1"))
COUNT = int(os.environ.get("NIBBLE_TEMPLATE_COUNT", "1500"))


class Generation(jinja2.ext.Extension):
    """Renders its body, as the tag of transformers does where nobody asks for the token mask."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


def make_environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form):
        return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).replace(tzinfo=None).strftime(form)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


ENVIRONMENT = make_environment()


@functools.lru_cache(maxsize=4)  # compiling costs far more than rendering
def compiled(source):
    return ENVIRONMENT.from_string(source)


def render_jinja(source, context):
    """The text, or None where jinja2 raises; and what it raised."""
    try:
        return compiled(source).render(**copy.deepcopy(context)), None  # a template can change a list
    except Exception as error:  # noqa: BLE001: any exception is a refusal
        return None, f"{type(error).__name__}: {error}"


def render_ours(tasks):
    lines = "".join(json.dumps({"template": t, "context": c, "now": NOW}) + "\n" for t, c in tasks)
    done = subprocess.run(
        [str(BUILD / "tests/render_lines")], input=lines.encode(), capture_output=True, check=True, timeout=600
    )
    answers = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert len(answers) == len(tasks)
    return answers


def compare(tasks):
    """Messages about the tasks where the two differ."""
    differences = []
    for (source, context), ours in zip(tasks, render_ours(tasks)):
        theirs, error = render_jinja(source, context)
        if any(words in ours.get("error", "") for words in ("64 bits", "complex numbers", "an escaped string")):
            continue  # Python's integers have no end, ours have
        if theirs is not None and any(name in ours.get("error", "") for name in ("'nosuch'", "'xmlattr_'")):
            continue  # jinja2 folds `false and x|nosuch` away before it looks for the filter
        if theirs is not None and " at 0x" in theirs and "out" in ours:
            continue  # an address of Python
        if theirs != ours.get("out"):
            shown = json.dumps(context, ensure_ascii=False)
            differences.append(
                f"{source!r}\n  context {shown[:600]}\n  jinja2 {theirs!r} {error or ''}\n  nibble {ours}"
            )
    return differences


# ---- templates in the manner of published models, over conversations

SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "Where & <when>", "default": "Köln"},
        "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "deep": {
            "type": "object",
            "properties": {"a": {"type": ["string", "null"]}, "b": {"type": "boolean", "nullable": True}},
            "required": ["a"],
        },
        "either": {"oneOf": [{"type": "number", "default": 1.5}, {"type": "object"}], "default": 2},
        "list": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "required": ["place", "deep"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells \"it\".", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "add", "description": None, "parameters": {"type": "object"}}},
]


def call(name, arguments, wrapped=True):
    function = {"name": name, "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function} if wrapped else function


def conversations():
    user = {"role": "user", "content": "Hallo — wie geht's? 😀 <b>&"}
    system = {"role": "system", "content": " Be brief.\n"}
    answer = {"role": "assistant", "content": "<think>\nhm, 1 < 2\n</think>\n\nGut."}
    reasoned = {"role": "assistant", "content": "Fine.", "reasoning_content": "\nwhy\nnot"}
    arguments = {"place": "Ulm \"x\"", "days": [1, 2.5, None, True], "deep": {"a": "ä", "b": {"c": []}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call("weather", arguments)]}
    two_calls = {"role": "assistant", "content": None, "tool_calls": [call("add", {"a": 1}), call("weather", {})]}
    bare_call = {"role": "assistant", "content": "so", "tool_calls": [call("add", {"x": "1"}, wrapped=False)]}
    result = {"role": "tool", "content": "{\"t\": 20}", "tool_call_id": "abcdefghi"}
    parts = {"role": "user", "content": [{"type": "text", "text": "look "}, {"type": "image"}, {"type": "text", "text": ""}]}
    return [
        [user],
        [system, user],
        [system, user, answer, user],
        [user, answer, user, reasoned],
        [user, reasoned],
        [system, user, calling, result, answer],
        [user, calling, result, result, reasoned, user],
        [user, two_calls, result, result],
        [user, bare_call, result],
        [system, user, calling, result],
        [parts],
        [system, parts, answer],
        [{"role": "system", "content": [{"type": "text", "text": "parts"}]}, user],
        [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": "\n"}],
        [user, user],
        [answer],
        [system],
        [system, system, user],
        [user, {"role": "tool", "content": [{"output": {"a": 1}}, {"type": "text", "text": "t"}]}],
        [user, calling, {"role": "tool", "content": [{"output": "o"}, {"type": "text", "text": "t"}]}],
        [{"role": "developer", "content": "do"}, user, answer],
        [{"role": "narrator", "content": "once"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "user", "content": 5, "custom_key": [1]}, {"role": "assistant", "content": {"a": 1}, "thinking": "t"}],
        [user, {"role": "assistant", "content": "<|channel|>analysis"}],
        [{"role": "user", "content": "<result>x</result>"}, answer, {"role": "user", "content": "/nothink"}],
        [user, {"role": "assistant", "content": "x" * 70, "thinking": "y"}],
        [],
    ]


def contexts():
    variants = [
        {},
        {"tools": TOOLS},
        {"tools": None, "enable_thinking": False},
        {"tools": [], "enable_thinking": True, "documents": [{"doc_id": 1, "text": "d"}], "controls": {"length": "short"}},
        {"tools": TOOLS[:1], "enable_thinking": False, "reasoning_effort": "high", "builtin_tools": ["search", "interpreter"]},
        {"tools": TOOLS, "tools_in_user_message": False, "model_identity": "I.", "enable_thinking": True},
    ]
    for messages in conversations():
        for variant in variants:
            for prompt in (True, False):
                yield {
                    "messages": messages,
                    "add_generation_prompt": prompt,
                    "bos_token": "<s>",
                    "eos_token": "</s>",
                    **variant,
                }


@pytest.mark.parametrize("name", TEMPLATES)
def test_template(name):
    source = TEMPLATES[name]
    tasks = [(source, context) for context in contexts()]
    differences = compare(tasks)
    assert not differences, "\n".join([str(len(differences))] + differences[:3])
    rendered = [render_jinja(*task)[0] for task in tasks]
    assert sum(text is not None for text in rendered) > len(tasks) // 4  # not all of them raise


# ---- random templates

CONTEXT = {
    "i": 7,
    "zero": 0,
    "neg": -3,
    "f": 2.5,
    "g": 1e16,
    "t": True,
    "n": None,
    "s": "Hello, Wörld of 'x' \"y\"",
    "e": "",
    "w": "  a b\n\tc <&> ",
    "num": " 42 ",
    "u": "日本語😀é",
    "l": [3, 1, 2],
    "m": [1, "a", None, 2.0, [1], {"k": 1}],
    "words": ["b", "A", "c", "a", "B"],
    "d": {"a": 1, "b": [1, 2], "items": 5, "c": {"x": "y"}},
    "rows": [
        {"name": "x", "v": 3, "on": True, "in": {"z": 1}},
        {"name": "Y", "v": 1, "on": False, "in": {"z": 2}},
        {"name": "y", "v": 2, "in": {}},
    ],
    "el": [],
    "ed": {},
}
NAMES = list(CONTEXT) + ["missing"]
CONSTANTS = ["0", "1", "2", "-1", "3", "10", "1.5", "0.1", "1e3", "'a'", "'b'", "''", "' '", "','", "\"it's\"", "'\\n'", "'é'",
             "true", "false", "none", "[]", "{}", "()", "[1, 2]", "(1, 'x')", "{'a': 1, 'b': 'c'}", "'name'", "'v'", "'%s'", "'l'"]
FILTERS = ["abs", "capitalize", "count", "length", "e", "escape", "first", "last", "float", "int", "list", "lower", "upper", "max",
           "min", "reverse", "reverse|list", "round", "safe", "sort", "string", "sum", "title", "tojson", "trim", "unique|list",
           "urlencode", "wordcount", "items|list", "dictsort", "forceescape", "join", "default", "d", "indent", "center(9)",
           "batch(2)|list", "slice(2)|list", "batch(2, 0)|list", "slice(2, 'f')|list", "default('x')", "default('x', true)",
           "join(', ')", "join('-', attribute='name')", "map('upper')|list", "map('string')|join('|')", "map(attribute='name')|list",
           "map(attribute='v', default=0)|list", "map('tojson')|list", "map('default', 'q')|list", "select|list", "reject|list",
           "select('odd')|list", "reject('none')|list", "select('string')|list", "select('in', [1, 'a'])|list", "selectattr('on')|list",
           "rejectattr('on')|list", "selectattr('v', 'gt', 1)|map(attribute='name')|list", "selectattr('name', 'equalto', 'x')|list",
           "rejectattr('in.z', 'defined')|list", "sort(reverse=true)", "sort(case_sensitive=true)", "sort(attribute='v')",
           "sort(attribute='name,v')", "groupby('name')|list", "groupby('in.z', default=9)", "dictsort(reverse=true)",
           "dictsort(by='value')", "replace('a', 'b')", "replace('l', 'L', 1)", "replace('', '-')", "round(1)", "round(0, 'ceil')",
           "round(1, 'floor')", "round(-1)", "truncate(9)", "truncate(5, true)", "truncate(5, false, '~', 0)", "trim('aH ')",
           "tojson(indent=2)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "int(5)",
           "int(0, 16)", "float(1)", "indent(2, true)", "indent(2, blank=true)", "indent('> ')", "format(1)", "format('a', 2)",
           "attr('name')", "attr('get')", "sum(attribute='v')", "sum(start=10)", "min(attribute='v')", "max(attribute='name')",
           "unique(attribute='name')|list", "first|default('-')", "map('first')|list", "map('length')|list", "nosuch", "select('nosuch')|list",
           "map('abs')|first", "items", "map", "xmlattr_", "tojson|length", "list|length", "map(attribute=0)|list"]
FILTERS = [f for f in FILTERS if f not in ("items",)]  # printing an iterator shows its address
TESTS = ["defined", "undefined", "none", "boolean", "true", "false", "integer", "float", "number", "string", "sequence", "iterable",
         "mapping", "callable", "odd", "even", "lower", "upper", "divisibleby 2", "divisibleby(3)", "eq 1", "equalto('a')", "ne none",
         "gt 1", "ge(2)", "lt 3", "le 2.5", "in [1, 'a', 2.5]", "in 'abc'", "in d", "sameas true", "sameas none", "escaped", "filter",
         "test", "== 7", "nosuch"]
METHODS = ["strip()", "lstrip()", "rstrip()", "strip('H a')", "rstrip('\\n\\t <>&c')", "split()", "split(',')", "split('o', 1)", "split(none, 1)",
           "rsplit()", "rsplit('o', 1)", "rsplit(none, 1)", "splitlines()", "splitlines(true)", "startswith('H')", "startswith(('x', 'H'))", "endswith('y\"')",
           "endswith('')", "replace('l', 'LL')", "replace('l', '', 1)", "lower()", "upper()", "title()", "capitalize()", "join(['a', 'b'])",
           "join(l)", "find('o')", "rfind('o')", "find('o', 5)", "find('o', 2, 4)", "index('o')", "count('l')", "count('')", "isdigit()", "isalpha()",
           "isalnum()", "isspace()", "islower()", "isupper()", "zfill(5)", "removeprefix('He')", "removesuffix('y\"')", "format(1, a=2)",
           "partition(',')", "rpartition('o')", "ljust(30)", "rjust(8, '*')", "center(31, '.')", "get('a')", "get('zz')", "get('zz', 1)", "get()",
           "items()", "keys()", "values()", "items()|list", "keys()|list", "index(2)", "count(1)", "copy()", "append(1)", "pop()", "update({})",
           "nosuch()", "get", "upper", "isascii()", "strip", "__class__", "a", "b", "c.x", "name", "v", "k"]
METHODS = [m for m in METHODS if m not in ("get", "upper", "strip")]  # printing a method shows its address


class Generator:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, items):
        return self.random.choice(items)

    def atom(self):
        return self.pick(NAMES) if self.random.random() < 0.65 else self.pick(CONSTANTS)

    def expression(self, depth):
        r = self.random.random()
        if depth <= 0 or r < 0.12:
            return self.atom()
        sub = lambda: self.expression(depth - 1)  # noqa: E731
        if r < 0.34:
            return f"({sub()})|{self.pick(FILTERS)}" if r < 0.2 else f"{self.atom()}|{self.pick(FILTERS)}"
        if r < 0.48:
            return f"{self.atom()}.{self.pick(METHODS)}"
        if r < 0.56:
            operator = self.pick(["+", "-", "*", "/", "//", "%", "~", "+", "~"])
            return f"{sub()} {operator} {sub()}"
        if r < 0.58:
            return f"{self.pick(['2', 'i', 'f', 'neg', 't', 's'])} ** {self.pick(['2', '0', '-1', '3', 'f', 'n'])}"
        if r < 0.66:
            return f"{sub()} {self.pick(['==', '!=', '<', '<=', '>', '>=', 'in', 'not in'])} {sub()}"
        if r < 0.71:
            return f"{sub()} {self.pick(['and', 'or'])} {sub()}"
        if r < 0.74:
            return f"{self.pick(['not ', '-', '+'])}{sub()}"
        if r < 0.80:
            return f"{self.atom()} is {self.pick(['', '', 'not '])}{self.pick(TESTS)}"
        if r < 0.84:
            return f"({sub()} if {sub()}" + (f" else {sub()})" if self.random.random() < 0.7 else ")")
        if r < 0.92:
            part = lambda: self.pick(["", "", "0", "1", "2", "-1", "-2", "100", "n"])  # noqa: E731
            index = self.pick(["0", "-1", "1", "5", "'a'", "'name'", "i", "n", "'items'", f"{part()}:{part()}", f"{part()}:{part()}:{part()}", "::-1"])
            # jinja2 folds a slice of a constant number into an undefined value, where one of a variable raises.
            return f"{self.pick(NAMES) if ':' in index else self.atom()}[{index}]"
        return self.pick(
            [
                lambda: f"[{sub()}, {sub()}]",
                lambda: f"{{'k': {sub()}, {self.atom()}: 1}}",
                lambda: f"({sub()},)",
                lambda: f"range({self.pick(['3', 'i', '1, 4', '5, 0, -2', 'n', '0, 3, 0'])})|list",
                lambda: f"dict(a={sub()}, b=1)",
                lambda: f"'{self.pick(['%s', '%d', '%5.2f|%s', '%-4s|', '%05d', '%r', '%x', '%%', '%(a)s', '%+d', '%e', '%g', '%5s%c'])}' % {sub()}",
                lambda: f"'{self.pick(['{}', '{0}-{0}', '{a}', '{:>5}', '{:05d}', '{:.2f}', '{!r}', '{{}}', '{:,}', '{0.a}', '{0[a]}', '{:<4}|', '{'])}'.format({self.atom()}, a=1)",
                lambda: f"{self.pick(['1 < 2 < 3', 'i > f > 1', '1 == 1.0 == true', 'l[0] in l in [l]'])}",
            ]
        )()

    def condition(self):
        return self.expression(1)

    def space(self):
        return self.pick(["", "", "", " ", "\n", "  \n  ", "text", " t\n\n"])

    def open(self):
        return self.pick(["{%", "{%", "{%-", "{%+"])

    def close(self):
        return self.pick(["%}", "%}", "-%}", "+%}"])

    def tag(self, body):
        return f"{self.open()} {body} {self.close()}"

    def iterable(self):
        return self.pick(["l", "words", "rows", "m", "s", "d", "d.items()", "d|items", "range(4)", "el", "missing", "[(1, 2), (3, 4)]", "u", "i",
                          "rows|map(attribute='name')", "words|select('lower')", "l|sort", self.expression(1)])

    def statement(self, depth):
        body = lambda: self.block(depth - 1)  # noqa: E731
        r = self.random.random()
        if depth <= 0 or r < 0.35:
            left, right = self.pick([("{{", "}}"), ("{{", "}}"), ("{{-", "-}}"), ("{{", "-}}")])
            return f"{left} {self.expression(2)} {right}"
        if r < 0.45:
            name = self.pick(["x", "y", "i", "s"])
            return self.tag(f"set {name} = {self.expression(1)}") + self.space() + f"{{{{ {name} }}}}"
        if r < 0.58:
            middle = self.tag(f"elif {self.condition()}") + body() if self.random.random() < 0.3 else ""
            otherwise = self.tag("else") + body() if self.random.random() < 0.5 else ""
            return self.tag(f"if {self.condition()}") + body() + middle + otherwise + self.tag("endif")
        if r < 0.76:
            target = self.pick(["x", "x", "x", "y", "k, v", "(k, v)"])
            test = f" if {self.pick(['x', 'x is odd', 'loop', 'x != 1', 'v', 'missing is undefined'])}" if self.random.random() < 0.2 else ""
            inner = self.pick(["{{ loop.index }}", "{{ loop.last }}:{{ x }}", "{{ loop.length }}", "{{ x }}", "{{ k }}={{ v }}", "{{ loop.revindex0 }}",
                               "{{ loop.previtem }}<{{ loop.nextitem }}", "{{ loop.cycle('a', 'b') }}", "{{ loop.changed(x) }}", "{% if loop.index > 2 %}{% break %}{% endif %}",
                               "{% if loop.first %}{% continue %}{% endif %}{{ x }}", "{% set i = loop.index %}", "{{ i }}{% set i = x %}", "{{ loop.depth }}", "{{ loop.nosuch }}"])
            otherwise = self.tag("else") + body() if self.random.random() < 0.3 else ""
            return self.tag(f"for {target} in {self.iterable()}{test}") + inner + body() + otherwise + self.tag("endfor")
        if r < 0.83:
            arguments = self.pick(["", "a", "a, b=2", "a=i, b=a", "x"])
            extra = self.pick(["{{ a }}{{ b }}", "{{ varargs }}", "{{ kwargs }}", "{{ x }}", "{{ caller() }}", "{{ caller }}", "{% set x = 5 %}"])
            given = self.pick(["", "1", "1, 2", "b=3", "1, b=l", "1, 2, 3", "zz=1", "*l", "**ed", "a=1, c=2"])
            name = self.pick(["mac", "mic"])
            use = self.pick([f"{{{{ {name}({given}) }}}}", f"{{% call {name}({given}) %}}in{{{{ x }}}}{{% endcall %}}", f"{{{{ {name}.name }}}}", f"{{% for x in l %}}{{{{ {name}({given}) }}}}{{% endfor %}}"])
            return self.tag(f"macro {name}({arguments})") + extra + body() + self.tag("endmacro") + use
        if r < 0.88:
            return self.tag("set ns = namespace(v=0)") + self.tag(f"for q in {self.iterable()}") + "{% set ns.v = ns.v + 1 %}" + self.tag("endfor") + "{{ ns.v }}{{ ns.w }}"
        return self.pick(
            [
                lambda: self.tag("set cap" + self.pick(["", " | upper", " | trim | length"])) + body() + self.tag("endset") + "[{{ cap }}]",
                lambda: self.tag("filter " + self.pick(["upper", "trim|title", "replace('a', 'b')", "indent(3)", "length"])) + body() + self.tag("endfilter"),
                lambda: self.tag(f"with x = {self.expression(1)}, y = x") + body() + "{{ x }}{{ y }}" + self.tag("endwith"),
                lambda: self.tag("generation") + body() + self.tag("endgeneration"),
                lambda: self.tag("raw") + "{{ x }}{% if %}" + self.space() + self.tag("endraw"),
                lambda: f"{{#{self.pick(['', '-', '+'])} c {{{{ }} {self.pick(['', '-', '+'])}#}}",
                lambda: self.tag(f"set p, q = {self.pick(['1, 2', 'l', 'd', 'd.items()|list', '(1,)', 's[:2]'])}") + "{{ p }}/{{ q }}",
                lambda: self.tag("set c = cycler('a', 'b')") + "{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}",
                lambda: self.tag("set j = joiner('|')") + "{% for x in l %}{{ j() }}{{ x }}{% endfor %}",
                lambda: self.tag(self.pick(["set", "if", "for x", "endfor", "else", "nosuch x", "set true = 1", "break", "set i.x = 1", "set loop = 1", "for in l"])),
                lambda: self.pick(["{{ }}", "{{ 1 2 }}", "{{ (1 }}", "{% ", "{{ 'a", "{{ a..b }}", "{{ @ }}", "{# x", "{{ 1 if }}", "{{ [1, }}", "{{ {1} }}", "{{ f(a=1, 2) }}"]),
            ]
        )()

    def block(self, depth):
        return "".join(self.space() + self.statement(depth) + self.space() for _ in range(self.random.choice([1, 1, 2])))


def test_random_expressions():
    generator = Generator(SEED)
    tasks = [("{{ " + generator.expression(2) + " }}", CONTEXT) for _ in range(COUNT)]
    differences = compare(tasks)
    assert not differences, "\n".join([str(len(differences))] + differences[:40])
    assert sum(render_jinja(*task)[0] is not None for task in tasks) > COUNT // 3


def test_random_templates():
    generator = Generator(SEED + 1)
    tasks = [(generator.block(2), CONTEXT) for _ in range(COUNT)]
    differences = compare(tasks)
    assert not differences, "\n".join([str(len(differences))] + differences[:40])
    assert sum(render_jinja(*task)[0] is not None for task in tasks) > COUNT // 4
