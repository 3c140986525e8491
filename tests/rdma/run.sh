#!/usr/bin/env bash
# What each VM of `make test-rdma` runs, side by side, for imports are slow there: the first the tests of reads, the
# second those of managers, and the owner that some of the first VM's tests read from. The first waits for the second,
# and tells of both.
told=build/rdma
pytest() {
  timeout 480 .venv/bin/python -m pytest --confcutdir=tests/rdma -p no:cacheprovider -p no:xdist -p no:hypothesispytest "$@"
  local rc=$?
  return $((rc == 5 ? 0 : rc))  # 5: -k has chosen none of these
}
if [ "$NODE_RANK" != 0 ]; then
  mkdir -p $told
  .venv/bin/python -m tests.rdma.far_owner &  # until the VM ends
  rc=0
  pytest tests/rdma/test_managers.py "$@" > $told/managers.log 2>&1 || rc=$?
  echo $rc > $told/managers.new
  mv $told/managers.new $told/managers.rc
  wait
fi
rc=0
pytest tests/rdma --ignore tests/rdma/test_managers.py "$@" || rc=$?
for _ in $(seq 480); do
  [ -s $told/managers.rc ] && break
  sleep 1
done
cat $told/managers.log
other=$(cat $told/managers.rc 2>/dev/null || echo 124)
exit $((rc > other ? rc : other))
