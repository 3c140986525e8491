"""What a span costs the thread that makes it: begin, some attributes, end, with a receiver that takes everything.

    python tools/span_cost.py

Prints the median of one span in microseconds, of many runs: processor time of the thread, and the clock, which a busy
machine makes longer; and how busy it was.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvbm.telemetry.span_export import exporting
from kvbm.telemetry.tracing import Value

_RUNS, _SPANS = 50, 200  # spans of a run go into the queue, which has room for them


class _Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """See the module."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tracing = exporting(f"http://127.0.0.1:{server.server_port}", 1.0, {"service.name": "cost"}, "0")
    values: dict[str, Value] = {"namespace": "0" * 32, "blocks": 8, "tenant": "acme"}
    busy_us, passed_us = [], []
    for _ in range(_RUNS):
        begin_s, begin_busy_s = time.perf_counter(), time.thread_time()
        for _ in range(_SPANS):
            tracing.begin("kvbm.acquire", "", values).end({"depth": 8, "outcome": "hit", "hits.host": 8})
        busy_us.append(1e6 * (time.thread_time() - begin_busy_s) / _SPANS)
        passed_us.append(1e6 * (time.perf_counter() - begin_s) / _SPANS)
        time.sleep(0.05)  # until the thread that sends has looked
    tracing.close()
    server.shutdown()
    busy, passed = statistics.median(busy_us), statistics.median(passed_us)
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"a span: {busy:.0f} us of processor time, {passed:.0f} us by the clock; {load}")


if __name__ == "__main__":
    main()
