#!/usr/bin/env python3
"""Holds src/ and apps/ to the architecture: who may include whom, and what may stand where.

  tools/check_layers.py               checks the tree; exits 1 with FILE:LINE: REASON for each break
  tools/check_layers.py --self-test   checks the checks
"""

import pathlib
import re
import sys

# The arrows: a folder may include itself and the folders after the colon. (src/ops/<backend>/ has a rule of its
# own below.) The link lines of CMakeLists.txt must name a subset of these.
ARROWS = {
    "base": "",
    "quant": "base",
    "text": "base",
    "checkpoint": "quant base",
    "ops": "quant base",
    "kv": "ops quant base",
    "experts": "ops checkpoint quant base",
    "parallel": "base",
    "model": "parallel experts kv ops checkpoint quant base",
    "engine": "model parallel experts kv ops checkpoint quant text base",
    "server": "engine model text base",
    "apps": "server engine model parallel experts kv ops checkpoint quant text base",
}

# (pattern, where it may stand, why). `where` is a regular expression on the path from the root.
PLACES = [
    (r"#\s*include\s*<(cuda|cublas|cutlass|cute/|cub/|nccl|\w*mmintrin|x86intrin|arm_neon|arm_sve|hwy/)",
     r"src/ops/", "device code belongs to src/ops/"),
    (r"\b(cuda[A-Z]\w*|__global__|__device__|_mm\d*_\w+|__m(128|256|512)\w*|asm)\b",
     r"src/ops/", "device code belongs to src/ops/"),
    (r"\b(secure_)?getenv\b", r"apps/", "the environment is read in apps/ and handed down as options"),
    (r"(?<![\w.>])(std::|::)?_?(exit|_Exit|quick_exit|abort|terminate)\s*\(",
     r"apps/|src/base/check\.cc$", "only apps/ ends the process; elsewhere return a Status, or CHECK"),
    (r"#\s*include\s*<nlohmann/json\.hpp>",
     r".*\.cc$|src/base/json\.h$|src/(checkpoint/json_reader|text/json_fields)\.h$|src/model/config\.h$|src/server/",
     "headers name JSON types through <nlohmann/json_fwd.hpp>: the full header costs each includer a second"),
    (r"\busing\s+namespace\s+(?!std::\w*literals)", r".*\.cc$", "no `using namespace` in a header"),
]

LINES_WARNED, LINES_MAX = 450, 700

SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')


def code_lines(text):
    """The lines without comments and without what stands in strings; #include lines as they are."""

    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return "\n" * token.count("\n") or " "
        return '""' + "\n" * token.count("\n")

    token = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|^[ \t]*#[ \t]*include[^\n]*|"(?:\\.|[^"\\\n])*"'
                       r"|(?<![\w'])'(?:\\.|[^'\\\n])+'", re.S | re.M)
    return token.sub(lambda m: m.group(0).split("//")[0] if m.group(0).lstrip().startswith("#") else blank(m),
                     text).split("\n")


def layer(path):
    """src/kv/page_pool.h -> kv; apps/nibble.cc -> apps."""
    parts = path.split("/")
    return parts[0] if parts[0] == "apps" else parts[1]


def backend(path):
    """src/ops/cpu/kernels.h -> cpu; None outside of the backends."""
    parts = path.split("/")
    return parts[2] if parts[:2] == ["src", "ops"] and len(parts) > 3 else None


def check_include(path, target, files):
    """Why the file at `path` may not include `target`, or None. `files`: all paths."""
    near = path.rsplit("/", 1)[0] + "/" + target
    full = next((p for p in ("src/" + target, target, near) if p in files), None)
    if full is None:
        return f'"{target}" is not a file of src/ or apps/'
    if full == near and full != "src/" + target and not full.startswith("apps/"):
        return f'"{target}": name it from src/: "{full[4:]}"'
    here, there = layer(path), layer(full)
    if here != there and there not in ARROWS.get(here, "").split():
        return f"{here} may not include {there}"
    if backend(full) and backend(full) != backend(path) and path != "src/ops/backend.cc":
        # The scalar code is the judge of all backends, and what a backend under construction falls back on.
        if not (backend(path) and full == "src/ops/reference/reference_ops.h"):
            return f"the {backend(full)} backend is included by src/ops/backend.cc and by itself alone"
    return None


def check_file(path, text, files):
    """Yields (line number, reason)."""
    if layer(path) not in ARROWS:
        yield 1, f"folder {layer(path)} is not in the table of tools/check_layers.py"
    lines = code_lines(text)
    for number, line in enumerate(lines, 1):
        if include := INCLUDE.match(line):
            if reason := check_include(path, include.group(1), files):
                yield number, reason
        for pattern, where, why in PLACES:
            if (found := re.search(pattern, line)) and not re.match(where, path):
                yield number, f"{found.group(0).strip()}: {why}"
    if path.endswith((".h", ".cuh")) and not path.endswith(".inc.h"):
        if not any(line.strip() == "#pragma once" for line in lines):
            yield 1, "no #pragma once"
    count = text.count("\n")
    if count > LINES_MAX:
        yield count, f"{count} lines, more than {LINES_MAX}: one idea per file"


def check_links(cmake):
    """Yields (line number, reason) for the nibble_library lines against the arrows."""
    for match in re.finditer(r"^nibble_library\((\w+)([^)]*)\)", cmake, re.M):
        number = cmake.count("\n", 0, match.start()) + 1
        name = match.group(1)
        if name not in ARROWS:
            yield number, f"folder {name} is not in the table of tools/check_layers.py"
        for linked in re.findall(r"\bnibble_(\w+)", match.group(2)):
            if linked not in ARROWS.get(name, "").split():
                yield number, f"{name} may not link {linked}"


def check_arrows():
    """The table has no cycle: each folder stands after all that it includes."""
    seen = []
    for name, targets in ARROWS.items():
        for target in targets.split():
            if target not in seen:
                yield f"ARROWS: {name} -> {target} points up"
        seen.append(name)


def check_tree(root):
    paths = [p for top in ("src", "apps") for p in sorted((root / top).rglob("*")) if p.suffix in SUFFIXES]
    texts = {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in paths}
    breaks = list(check_arrows())
    for path, text in texts.items():
        breaks += [f"{path}:{number}: {reason}" for number, reason in check_file(path, text, texts)]
        if LINES_WARNED < text.count("\n") <= LINES_MAX:
            print(f"{path}: warning: {text.count(chr(10))} lines, more than {LINES_WARNED}")
    breaks += [f"CMakeLists.txt:{n}: {reason}" for n, reason in check_links((root / "CMakeLists.txt").read_text())]
    print("\n".join(breaks) if breaks else f"{len(texts)} files keep to the arrows")
    return 1 if breaks else 0


FILES = {"src/base/check.h", "src/base/json.h", "src/quant/matrix.h", "src/ops/ops.h", "src/kv/page_pool.h",
         "src/ops/cpu/cpu_ops.h", "src/ops/cuda/device.h", "src/ops/reference/reference_ops.h", "src/text/utf8.h",
         "src/model/spec.h", "src/engine/engine.h", "src/server/http.h", "apps/options.h"}

# (path, a line of it, a part of the reason or None where the line is right)
CASES = [
    ("src/engine/engine.cc", '#include "text/utf8.h"', None),
    ("apps/run.cc", '#include "options.h"', None),
    ("apps/run.cc", '#include "server/http.h"', None),
    ("src/text/utf8.cc", '#include "base/check.h"', None),
    ("src/base/check.cc", '#include "quant/matrix.h"', "base may not include quant"),
    ("src/text/utf8.cc", '#include "quant/matrix.h"', "text may not include quant"),
    ("src/ops/ops.cc", '#include "kv/page_pool.h"', "ops may not include kv"),
    ("src/model/decoder.cc", '#include "text/utf8.h"', "model may not include text"),
    ("src/model/decoder.cc", '  #  include "engine/engine.h"', "model may not include engine"),
    ("src/engine/engine.cc", '#include "server/http.h"', "engine may not include server"),
    ("src/server/http.cc", '#include "apps/options.h"', "server may not include apps"),
    ("src/kv/ring.cc", '#include "page_pool.h"', "name it from src/"),
    ("src/kv/ring.cc", '#include "kv/gone.h"', "not a file"),
    ("src/ops/backend.cc", '#include "ops/cpu/cpu_ops.h"', None),
    ("src/ops/cpu/kernels.cc", '#include "ops/cpu/cpu_ops.h"', None),
    ("src/ops/cpu/kernels.cc", '#include "ops/reference/reference_ops.h"', None),
    ("src/ops/ops.cc", '#include "ops/reference/reference_ops.h"', "by itself alone"),
    ("src/ops/cpu/kernels.cc", '#include "ops/cuda/device.h"', "by itself alone"),
    ("src/model/decoder.cc", '#include "ops/cpu/cpu_ops.h"', "by itself alone"),
    ("src/new/thing.cc", "", "not in the table"),
    ("src/ops/cpu/kernels.cc", "#include <immintrin.h>", None),
    ("src/quant/nvfp4.cc", "#include <immintrin.h>", "device code"),
    ("src/quant/nvfp4.cc", "#include <arm_neon.h>", "device code"),
    ("src/kv/ring.cc", "#include <cuda_runtime.h>", "device code"),
    ("src/kv/ring.cc", "  cudaFree(pages);", "device code"),
    ("src/kv/ring.cc", "  return _mm256_add_ps(a, b);", "device code"),
    ("src/kv/ring.cc", "  // cudaFree would be wrong here", None),
    ("apps/run.cc", 'std::getenv("HF_HOME");', None),
    ("src/base/file.cc", 'const char* home = std::getenv("HOME");', "environment"),
    ("src/base/check.cc", "std::abort();", None),
    ("src/base/file.cc", "std::abort();", "ends the process"),
    ("src/base/file.cc", "  exit(1);", "ends the process"),
    ("src/base/file.cc", "  ::_exit (1);", "ends the process"),
    ("src/engine/engine.cc", "  request.abort(); loop->exit(); on_exit(1);", None),
    ("src/engine/engine.cc", '  log_info("exit(1)");  // exit(1)', None),
    ("src/engine/engine.cc", "  char c = '\"'; exit(1); char d = '\"';", "ends the process"),
    ("src/engine/engine.cc", "  int64_t n = 1'000'000; exit(1); int m = 2'000;", "ends the process"),
    ("src/engine/engine.cc", '  f(R"(exit(1) " )");', None),
    ("src/text/utf8.h", "#pragma once\n#include <nlohmann/json_fwd.hpp>", None),
    ("src/text/utf8.cc", "#include <nlohmann/json.hpp>", None),
    ("src/text/utf8.h", "#pragma once\n#include <nlohmann/json.hpp>", "json_fwd"),
    ("src/text/utf8.h", "#pragma once\nusing namespace std;", "using namespace"),
    ("src/text/utf8.h", "// #pragma once", "no #pragma once"),
    ("src/text/utf8.cc", "\n" * 700, None),
    ("src/text/utf8.cc", "\n" * 701, "more than 700"),
]

LINK_CASES = [
    ("nibble_library(text nibble_base PkgConfig::PCRE2)", None),
    ("nibble_library(text nibble_base\n  nibble_quant)", "text may not link quant"),
    ("nibble_library(base nibble_model)", "base may not link model"),
    ("nibble_library(novel nibble_base)", "not in the table"),
]


def self_test():
    results = [(f"{path}: {line!r:.80}", expected, [reason for _, reason in check_file(path, line, FILES)])
               for path, line, expected in CASES]
    results += [(line, expected, [reason for _, reason in check_links(line)]) for line, expected in LINK_CASES]
    wrong = [f"{what}\n  expected {expected}, found {found}" for what, expected, found in results
             if (found if expected is None else not any(expected in reason for reason in found))]
    print("\n".join(wrong) if wrong else f"{len(results)} cases as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        sys.exit(self_test())
    if sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(check_tree(pathlib.Path(__file__).resolve().parent.parent))
