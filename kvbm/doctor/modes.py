"""Who else of this machine's users may read or write what kvbm keeps on disk."""

from __future__ import annotations

from pathlib import Path

from kvbm.config import Settings
from kvbm.core.errors import KvbmError
from kvbm.doctor.finding import DoctorFinding, ok, warning
from kvbm.doctor.sql_library import sql_library
from kvbm.files import Exposed, exposed

_CHECK = "file modes"


def look_at_modes(settings: Settings) -> Exposed:
    """What of the settings' files and folders others may read or write."""
    return exposed([Path(path) for path in kept_paths(settings) if path])


def judge_modes(found: Exposed) -> DoctorFinding:
    """A warning: it works, and names, hashes and keys are open to other users."""
    if not found.entries:
        return ok(_CHECK, "nothing that kvbm keeps is open to other users")
    shown = ", ".join(found.paths) + (", …" if found.entries > len(found.paths) else "")
    return warning(_CHECK, f"other users may read or write {found.entries}: {shown}", found.remedy)


def kept_paths(settings: Settings) -> list[str]:
    """Where the settings have something lie that holds names, hashes, events, blocks or keys."""
    catalog, nvme = settings.catalog, settings.pools.nvme
    file = _sqlite_file(catalog.database)
    databases = [f"{file}{suffix}" for suffix in ("", "-wal", "-shm")] if file else []
    pools = [part for part in nvme.path.split(":") if not part.startswith("/dev/")]
    keys = [settings.pools.object.keys, settings.nats.credentials, settings.nats.nkey_seed, catalog.tenant_secrets_file]
    keys += [catalog.token, catalog.tls_key, catalog.client_key, settings.nats.tls_key]
    return [
        settings.instance.data_dir,
        catalog.checkpoints,
        catalog.archive,
        nvme.folder,
        catalog.access,
        *databases,
        *pools,
        *keys,
    ]


def _sqlite_file(url: str) -> str:
    """The file of a database URL; "" where it names none, or nothing here can read it."""
    try:
        sql = sql_library()
        parsed = sql.parse_url(url) if url else None
    except KvbmError:
        return ""
    return (parsed.database or "") if parsed is not None and sql.is_sqlite(parsed) else ""
