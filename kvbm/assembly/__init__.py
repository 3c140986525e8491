"""Settings → managers, catalogs and janitors. The only place that joins technologies to protocols."""

from kvbm.assembly.janitor import janitor_id, run_gc
from kvbm.assembly.manager import (
    catalog_client,
    journal_folder,
    kvbm_version,
    open_engine_manager,
    open_manager,
    run_catalog,
)
from kvbm.assembly.native import (
    CODER,
    NATIVE,
    NATIVE_ARENA,
    NATIVE_CORE,
    NATIVE_FOLD,
    NATIVE_INDEX,
    NATIVE_LEDGER,
    OPEN_BLOCK_IO,
    Core,
    RowCopier,
    copy_queue,
    decode_columns,
    hash_prompts,
    segment_copies,
)
from kvbm.assembly.pools import instance_folder, nvme_paths, open_objects, pod_file, pool_name

__all__ = [
    "CODER",
    "NATIVE",
    "NATIVE_ARENA",
    "NATIVE_CORE",
    "NATIVE_FOLD",
    "NATIVE_INDEX",
    "NATIVE_LEDGER",
    "OPEN_BLOCK_IO",
    "Core",
    "RowCopier",
    "catalog_client",
    "copy_queue",
    "decode_columns",
    "hash_prompts",
    "instance_folder",
    "janitor_id",
    "journal_folder",
    "kvbm_version",
    "nvme_paths",
    "open_engine_manager",
    "open_manager",
    "open_objects",
    "pod_file",
    "pool_name",
    "run_catalog",
    "run_gc",
    "segment_copies",
]
