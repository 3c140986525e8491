#!/bin/sh
# Builds the C++ tests twice and runs them: all under ASan with UBSan, then under TSan those that may begin a thread,
# because as built for ASan they name what begins one: a test without any has no race. Whichever file is new is among
# them, or has no thread. Needs a C++20 compiler with nm, and CMake. With -O1 and line numbers alone, which compiles in
# half the time of -O2 -g.
set -eu
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"

# build_folder SANITIZER
build_folder() { echo "build/native-test-$(echo "$1" | tr , -)"; }

# build_and_run SANITIZER TESTS [ARGUMENT OF CTEST]...: only those tests, which semicolons separate; all of them where
# it is empty
build_and_run() {
  sanitizer="$1"
  build="$(build_folder "$sanitizer")"
  tests="$2"
  shift 2
  cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1 -DNDEBUG" \
    -DKVBM_BUILD_PYTHON=OFF -DKVBM_BUILD_TESTS=ON -DKVBM_ONLY_TESTS="$tests" -DKVBM_SANITIZE="$sanitizer" > /dev/null
  cmake --build "$build" --parallel 2 > "$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }
  UBSAN_OPTIONS=print_stacktrace=1 ctest --test-dir "$build" --parallel 2 --output-on-failure "$@"
}

build_and_run address,undefined "" "$@"

build="$(build_folder address,undefined)"
threaded=
for source in native/tests/test_*.cpp; do
  name="$(basename "$source" .cpp)"
  nm "$build/$name" > "$build/names"
  if grep -qE 'pthread_create|_M_start_thread' "$build/names"; then
    threaded="$threaded;$name"
  fi
done
: "${threaded:?no test begins a thread, it seems}"
build_and_run thread "${threaded#;}" "$@"
