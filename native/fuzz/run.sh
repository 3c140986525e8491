#!/bin/sh
# run.sh SECONDS [TARGET]: builds the fuzz targets with clang and runs each, or only TARGET, for that many seconds; with
# 0 only over the inputs of its corpus, once: nothing is random then, and time decides nothing.
# native/fuzz/fuzz_NAME.cpp is target NAME and begins from native/fuzz/corpus/NAME/, which it does not change: what it
# finds on the way goes to build/fuzz/corpus/NAME/ (minimise.sh brings that home), an input that fails to
# build/fuzz/findings/NAME/ (it becomes a test in native/tests with its fix).
# Inputs have at most 4 KiB. One allocation of 1 MiB, 64 MiB of memory in all (ASan's own included) or 5 s for one input
# fail; with 0 seconds 256 MiB or 60 s.
set -eu
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
seconds="${1:?usage: run.sh SECONDS [TARGET]}"
build=build/fuzz
compiler="${FUZZ_CXX:-clang++}"
mkdir -p "$build"

probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if ! echo "$probe" | "$compiler" -x c++ -fsanitize=fuzzer,address,undefined -o "$build/probe" - \
  > "$build/probe.log" 2>&1; then
  echo "fuzzing needs clang and its libFuzzer: apt-get install clang libclang-rt-14-dev" \
    "(14: what clang --version says)" >&2
  exit 1
fi
cmake -S . -B "$build" -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" -DKVBM_BUILD_PYTHON=OFF \
  -DKVBM_BUILD_FUZZERS=ON > "$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }
cmake --build "$build" --parallel 2 > "$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }

for source in native/fuzz/fuzz_${2:-*}.cpp; do
  [ -e "$source" ] || { echo "no such target: $source" >&2; exit 1; }
  target="$(basename "$source" .cpp)"
  name="${target#fuzz_}"
  seeds="native/fuzz/corpus/$name"
  found="$build/corpus/$name"
  findings="$build/findings/$name"
  log="$build/$name.log"
  mkdir -p "$seeds" "$found" "$findings"
  if [ "$seconds" = 0 ]; then
    [ -n "$(ls "$seeds")" ] || { echo "$seeds has no inputs" >&2; exit 1; }
    echo "fuzz $name over its corpus"
    set -- -runs=0 -timeout=60 -rss_limit_mb=256
    corpora="$seeds"
  else
    echo "fuzz $name for $seconds s"
    set -- -max_total_time="$seconds" -timeout=5 -rss_limit_mb=64
    corpora="$found $seeds"
  fi
  if ! ASAN_OPTIONS=quarantine_size_mb=1 UBSAN_OPTIONS=print_stacktrace=1 nice -n 10 "$build/$target" \
      "$@" -max_len=4096 -malloc_limit_mb=1 -artifact_prefix="$findings/" -print_final_stats=1 $corpora \
      > "$log" 2>&1; then
    tail -n 60 "$log"
    newest=$(ls -t "$findings"/* 2> /dev/null | head -n 1) || true
    echo "fuzz $name FAILED; the input lies in $findings/, again with: $build/$target $newest" >&2
    exit 1
  fi
  grep -E '\b(INITED|DONE)\b|^stat::(number|average|peak)' "$log"
done
