"""A program: moto's server, with puts that are one step each. moto itself looks at a put's condition and stores it
later, so two can pass.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import main

_LOCK = threading.RLock()
_LOOK_S = float(os.environ["KVBM_TEST_LOOK_S"])
_put, _look = S3Response.put_object, S3Backend.get_object


def _put_in_one_step(response: S3Response) -> Any:
    with _LOCK:
        return _put(response)


def _look_slowly(backend: S3Backend, *arguments: Any, **named: Any) -> Any:
    found = _look(backend, *arguments, **named)
    time.sleep(_LOOK_S)
    return found


if __name__ == "__main__":
    S3Response.put_object = _put_in_one_step  # type: ignore[method-assign]
    if _LOOK_S:
        S3Backend.get_object = _look_slowly  # type: ignore[method-assign]
    main()
