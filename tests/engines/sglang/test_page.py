"""docs/sglang.md from `pip install` to a hit: its commands, in an environment of their own, with a wheelhouse in the
place of an index; SGLang's engine needs a GPU, and its parser, radix cache and storage do not.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.wheelhouse import Environment, pack_ours

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "sglang.md").read_text()
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def command(beginning: str) -> str:
    """The page's only block of commands that begins so."""
    (found,) = (text for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if text.startswith(beginning))
    return str(found)


@pytest.mark.timeout(600)
def test_whoever_follows_the_page_has_a_hit(tmp_path: Path) -> None:
    build, install = (line.partition("#")[0].strip() for line in command("make wheels").splitlines())
    assert build == "make wheels" and install == "pip install --find-links dist 'kvbm-ledger[s3]'"
    pack_ours(tmp_path / "dist")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    environment = Environment(tmp_path / "environment")
    environment.run(install, tmp_path)

    def here(text: str) -> str:
        data = text.replace("/var/lib/kvbm", str(tmp_path / "data")).replace("COMMIT", COMMIT)
        return re.sub(r'"[0-9]+GiB"', '"16MiB"', data)

    launch = here(command("python -m sglang")).replace("\\\n", "")  # as a shell joins lines
    module, arguments = re.split(r"(?<=launch_server) ", launch, maxsplit=1)
    assert module == "python -m sglang.launch_server"
    follow = shlex.join(["python", "-m", "tests.engines.sglang.harness.follow", *shlex.split(arguments)])
    told = json.loads(environment.run(follow, tmp_path).splitlines()[-1])
    assert told["kvbm"].startswith(str(tmp_path / "environment")), "kvbm is another one than was installed"
    assert told["read"] == told["asked"] > 0
    stat, verify = here(command("kvbm-replay stat")).splitlines()
    assert "NVME" in environment.run(stat, tmp_path)
    environment.run(verify, tmp_path)
