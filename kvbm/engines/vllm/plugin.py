"""What vLLM calls in each of its processes: `KvbmConnector` becomes a name it knows."""

from __future__ import annotations

NAME = "KvbmConnector"
MODULE = "kvbm.engines.vllm"  # which says in one sentence what keeps the connector from being imported


def register() -> None:
    """Tell vLLM's connector factory where `KvbmConnector` is. Nothing of it is imported before it is used.

    The entry point `vllm.general_plugins` in pyproject.toml names it. Harmless when called again, in any process, and
    without vLLM.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "vllm":
            raise
        return
    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:  # registered already: vLLM has no way to ask
        return
