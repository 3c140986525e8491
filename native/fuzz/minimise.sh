#!/bin/sh
# minimise.sh TARGET: brings home what the runs of TARGET found: native/fuzz/corpus/TARGET/ becomes the fewest inputs,
# small ones first, that reach all that those and the committed ones reach. After run.sh, whose build it uses; review
# with git.
set -eu
cd "$(dirname "$0")/../.."
name="${1:?usage: minimise.sh TARGET}"
seeds="native/fuzz/corpus/$name"
found="build/fuzz/corpus/$name"
fewest="build/fuzz/fewest/$name"
rm -rf "$fewest"
mkdir -p "$fewest" "$found"
"build/fuzz/fuzz_$name" -merge=1 -use_counters=0 -max_len=4096 "$fewest" "$seeds" "$found"
rm -rf "$seeds"
cp -r "$fewest" "$seeds"
echo "$seeds: $(ls "$seeds" | wc -l) inputs, $(cat "$seeds"/* | wc -c) bytes"
