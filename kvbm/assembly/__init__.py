"""Settings → managers, catalogs and janitors. The only place that joins technologies to protocols."""

from kvbm.assembly.catalog import run_catalog
from kvbm.assembly.janitor import janitor_id, run_gc
from kvbm.assembly.manager import open_engine_manager, open_manager
from kvbm.assembly.metrics import metrics_collector, serve_metrics
from kvbm.assembly.native import (
    CODER,
    NATIVE,
    NATIVE_AGES,
    NATIVE_ARENA,
    NATIVE_CORE,
    NATIVE_FOLD,
    NATIVE_INDEX,
    NATIVE_LEDGER,
    NATIVE_MESSAGES,
    NATIVE_STAYS,
    NEW_FOREIGN_TABLE,
    OPEN_BLOCK_IO,
    Core,
    RowCopier,
    copy_queue,
    decode_columns,
    device_rings,
    hash_prompts,
    last_touches,
    packed_tokens,
    segment_copies,
    told_tiers,
)
from kvbm.assembly.pools import instance_folder, journal_folder, nvme_paths, open_objects, pod_file
from kvbm.assembly.recorded import RecordedEvent, RecordedLog, open_log, what_if
from kvbm.assembly.replica import open_replica
from kvbm.assembly.services import catalog_client, catalog_clients, catalog_credentials, stream_credentials
from kvbm.assembly.start import kvbm_version

__all__ = [
    "CODER",
    "NATIVE",
    "NATIVE_AGES",
    "NATIVE_ARENA",
    "NATIVE_CORE",
    "NATIVE_FOLD",
    "NATIVE_INDEX",
    "NATIVE_LEDGER",
    "NATIVE_MESSAGES",
    "NATIVE_STAYS",
    "NEW_FOREIGN_TABLE",
    "OPEN_BLOCK_IO",
    "Core",
    "RecordedEvent",
    "RecordedLog",
    "RowCopier",
    "catalog_client",
    "catalog_clients",
    "catalog_credentials",
    "copy_queue",
    "decode_columns",
    "device_rings",
    "hash_prompts",
    "instance_folder",
    "janitor_id",
    "journal_folder",
    "kvbm_version",
    "last_touches",
    "metrics_collector",
    "nvme_paths",
    "open_engine_manager",
    "open_log",
    "open_manager",
    "open_objects",
    "open_replica",
    "packed_tokens",
    "pod_file",
    "run_catalog",
    "run_gc",
    "segment_copies",
    "serve_metrics",
    "stream_credentials",
    "told_tiers",
    "what_if",
]
