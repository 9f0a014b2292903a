#!/bin/bash
# Checks the cuda backend on a machine with a GPU, and measures it. DIRECTORY is a build directory (which is made
# if it is not there), or what tools/gpu_bundle.sh packed for a machine that has this tree but no build of it;
# each check's output goes to a file in LOGS.
#
#   tools/gpu_check.sh DIRECTORY LOGS [quick|full|bench|all]
#
# quick: without compute-sanitizer (full, the default, with it); bench: the benches alone; all: everything, under
# 10 minutes. Exit code 0: everything passed (a missing compute-sanitizer is said, and is no failure).
set -u
usage='usage: gpu_check.sh DIRECTORY LOGS [quick|full|bench|all]'
directory=${1:?$usage} logs=${2:?$usage} mode=${3:-full}
if [ ! -d "$directory" ]; then
  cmake -S "$(dirname "$0")/.." -B "$directory" -G Ninja -DCMAKE_BUILD_TYPE=Release &&
    ninja -C "$directory" all moe_layer_bench linear_bench || exit 1
fi
directory=$(cd "$directory" && pwd) || exit 1
mkdir -p "$logs" && logs=$(cd "$logs" && pwd) || exit 1
tests=$directory/tests
root=$(cd "$(dirname "$0")/.." && pwd)
export NIBBLE_TEST_SOURCE_DIR=$root NIBBLE_TEST_BINARY_DIR=$directory
[ -d "$directory/lib" ] && export LD_LIBRARY_PATH=$directory/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
if [ ! -d "$directory/golden" ]; then
  mkdir "$directory/golden"
  for archive in "$root"/tests/golden/*.tar.xz; do tar -C "$directory/golden" -xJf "$archive" || exit 1; done
fi
demo=$root/models/demo

failed=0
check() {  # check NAME COMMAND...: runs it, keeps its output, says how it went
  local name=$1 begin=$SECONDS code
  shift
  timeout 300 "$@" >"$logs/$name.log" 2>&1
  code=$?
  if [ $code -eq 0 ]; then
    printf 'passed  %-24s %4d s\n' "$name" $((SECONDS - begin))
  else
    failed=1
    printf 'FAILED  %-24s %4d s, exit code %d; the end of %s:\n' "$name" $((SECONDS - begin)) $code "$name.log"
    grep -E '^\[  FAILED|Failure|check failed|=========' "$logs/$name.log" | head -20
    tail -8 "$logs/$name.log"
  fi
}

bench() {  # bench NAME COMMAND...: like check, and shows the output
  check "$@" && cat "$logs/$1.log"
}
if [ "$mode" = bench ] || [ "$mode" = all ]; then
  for program in moe_layer_bench linear_bench; do bench $program "$directory/$program"; done
  for options in '-m synthetic:laguna-s-2.1 -p 512 -n 64 -b 1,2,4,8,16,32' \
    '-m synthetic:glm-5.3-flash:layers=8 -p 512 -n 32 -b 1,8,32'; do
    name=${options#*:}
    bench "${name%% *}" "$directory/nibble" bench --device cuda -r 3 $options
  done
fi
if [ "$mode" = bench ]; then
  exit $failed
fi

check doctor "$directory/nibble" doctor --device cuda
cat "$logs/doctor.log"
check ops "$tests/ops_test" '--gtest_filter=*cuda*:Cuda.*' --gtest_brief=1
check kv "$tests/kv_test" '--gtest_filter=*cuda*' --gtest_brief=1
check golden "$tests/model_test" '--gtest_filter=Models/Golden.*cuda*' --gtest_brief=1
check demo "$tests/model_test" '--gtest_filter=*Demo*cuda*' --gtest_brief=1
check streams "$tests/engine_test" '--gtest_filter=*ConcurrentStreams*cuda' --gtest_brief=1
for device in cuda cpu; do
  check "run_$device" "$directory/nibble" run -m "$demo" --device $device -p "Once upon a time there was a little" \
    --temp 0 -n 60
done
# What is printed but for the timing lines, which go to stderr with a name in front.
if diff <(grep -v '^nibble:' "$logs/run_cuda.log") <(grep -v '^nibble:' "$logs/run_cpu.log") >"$logs/text.diff"; then
  echo "passed  greedy text as on the cpu"
else
  echo "differs greedy text from the cpu's (a failure only where margins are wide): text.diff"
fi
grep '^nibble:' "$logs/run_cuda.log"

if [ "$mode" != quick ]; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
  # Some virtual machines have the tool and a device that it does not support.
  if [ -z "$sanitizer" ]; then
    echo "missing compute-sanitizer: its checks did not run"
  elif ! "$sanitizer" --error-exitcode 9 "$directory/nibble" doctor --device cuda >"$logs/sanitizer.log" 2>&1; then
    echo "failed  compute-sanitizer on nibble doctor, so its checks did not run; the end of sanitizer.log:"
    tail -5 "$logs/sanitizer.log"
    grep -q 'not supported' "$logs/sanitizer.log" || failed=1
  else
    some='*cuda*:-*AllNibbles*:*AllHalf*:*AllFp8*:*ARowAlone*:*AgreesWithTheFormula*:*ManyRows*:*EveryFormat*:*MixedFormats*'
    check memcheck "$sanitizer" --tool memcheck --error-exitcode 9 "$tests/ops_test" "--gtest_filter=$some" --gtest_brief=1
    # It takes the build that it can follow (NIBBLE_RACECHECK), where there is one.
    for program in "$directory-racecheck/tests/ops_test" "$tests/ops_test_racecheck" "$tests/ops_test"; do
      [ -x "$program" ] && break
    done
    check racecheck "$sanitizer" --tool racecheck --error-exitcode 9 "$program" \
      '--gtest_filter=*Linear.SeveralMatricesAtOnce*cuda*:*Route*cuda*:*ExpertFfn.ManyExperts*cuda*:*ExpertFfn.AllRows*cuda*:*Attend.ARing*cuda*:*Attend.PromptsHave*/cuda:*EqualScores*cuda*:*CausalConv.Steps*cuda*:*Streams*cuda*:*Fused.AttendAndGate/cuda:*Fused.PrepareAttend/cuda:*Fused.Rout*/cuda' --gtest_brief=1
  fi
fi
[ $failed -eq 0 ] && echo "all passed" || echo "some failed"
exit $failed
