#!/bin/sh
# run.sh SECONDS|corpus [TARGET]: builds the fuzz targets with clang and runs each, or only TARGET, for that many seconds;
# with `corpus` it only runs what lies in native/fuzz/corpus, which is the same each time.
# native/fuzz/fuzz_NAME.cpp is target NAME and begins from native/fuzz/corpus/NAME/, which it does not change: what it finds
# on the way goes to build/fuzz/corpus/NAME/ (minimise.sh brings that home), an input that fails to build/fuzz/findings/NAME/
# (it becomes a test in native/tests with its fix).
# Inputs have at most 4 KiB. One allocation of 1 MiB, 256 MiB of memory in all (ASan's own included) or 60 s for one input fail.
set -eu
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
seconds="${1:?usage: run.sh SECONDS|corpus [TARGET]}"
build=build/fuzz
compiler="${FUZZ_CXX:-clang++}"
mkdir -p "$build"

probe='extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }'
if ! echo "$probe" | "$compiler" -x c++ -fsanitize=fuzzer,address,undefined -o "$build/probe" - > "$build/probe.log" 2>&1; then
  echo "fuzzing needs clang and its libFuzzer: apt-get install clang libclang-rt-14-dev (14: what clang --version says)" >&2
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
  if [ "$seconds" = corpus ]; then
    echo "fuzz $name: $(ls "$seeds" | wc -l) inputs of the corpus"
    bound=-runs=0
  else
    echo "fuzz $name for $seconds s"
    bound="-max_total_time=$seconds"
  fi
  if ! ASAN_OPTIONS=quarantine_size_mb=1 UBSAN_OPTIONS=print_stacktrace=1 nice -n 10 "$build/$target" \
      "$bound" -max_len=4096 -timeout=60 -rss_limit_mb=256 -malloc_limit_mb=1 \
      -artifact_prefix="$findings/" -print_final_stats=1 "$found" "$seeds" > "$log" 2>&1; then
    tail -n 60 "$log"
    echo "fuzz $name FAILED; the input lies in $findings/, again with: $build/$target $(ls -t "$findings"/* 2> /dev/null | head -n 1)" >&2
    exit 1
  fi
  grep -E '\b(INITED|DONE)\b|^stat::(number|average|peak)' "$log"
done
