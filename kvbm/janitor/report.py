"""What a run of the janitor has found and done, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvbm.core.ids import NamespaceId
from kvbm.core.policy import OTHERS
from kvbm.terminal import as_json as json_of
from kvbm.terminal import plain


class Part(msgspec.Struct, kw_only=True):
    """One namespace of the pool.

    Attributes:
        tenant: "" where nobody has told whose it is.
        objects, blocks, bytes: that were there and claimed, those included that have gone in this run.
    """

    tenant: str = ""
    objects: int = 0
    blocks: int = 0
    bytes: int = 0
    withdrawn: int = 0
    deleted: int = 0
    deleted_bytes: int = 0


class Limit(msgspec.Struct, frozen=True):
    """What may be in the pool at most, beside what was there: those included that have gone in this run."""

    bytes: int
    limit_bytes: int


class Report(msgspec.Struct, kw_only=True):
    """Counts are of objects, unless they say otherwise.

    Attributes:
        parts: by namespace id, hex.
        found: without a claim, and claimed now.
        waiting: without a claim, but too young to be sure that none is on its way.
        mended_blocks: claimed again, because other blocks of their object were claimed.
        missing_blocks: claimed, but in no object: withdrawn.
        withdrawn: by reason.
        used: chosen, but used before their claims were withdrawn.
        kept: withdrawn, and claimed again before they were deleted.
        deleted: of which those of lists that an earlier janitor left.
        undeleted: the store did not delete them; the next run does.
        foreign: names that are none of ours, or whose header does not prove what the name says; left alone, always.
        unknown: the store did not say what they are.
        future_blocks: claimed by an instance whose clock is ahead of the store's; they do not age.
        lists: withdrawn lists that an earlier janitor left.
        limits: of tenants that have one; "*": of all together that the settings do not name.
        pool_limit: of the whole pool; None: it has none.
    """

    pool: str = ""
    dry_run: bool = False
    parts: dict[str, Part] = {}
    found: int = 0
    waiting: int = 0
    mended_blocks: int = 0
    missing_blocks: int = 0
    withdrawn: dict[str, int] = {}
    used: int = 0
    kept: int = 0
    deleted: int = 0
    undeleted: int = 0
    foreign: int = 0
    first_foreign: str = ""
    unknown: int = 0
    future_blocks: int = 0
    lists: int = 0
    limits: dict[str, Limit] = {}
    pool_limit: Limit | None = None

    def part(self, namespace: NamespaceId) -> Part:
        """The part of a namespace."""
        return self.parts.setdefault(namespace.hex(), Part())


def as_json(report: Report) -> str:
    """One line of JSON."""
    return json_of(report)


def as_words(report: Report) -> str:
    """A table by namespace, and a line for each thing that happened."""
    rows = [("tenant", "namespace", "objects", "blocks", "bytes", "withdrawn", "deleted")]
    for name, part in sorted(report.parts.items(), key=lambda entry: (entry[1].tenant, entry[0])):
        rows.append(
            (
                plain(part.tenant) or "-",
                name[:8],
                f"{part.objects:,}",
                f"{part.blocks:,}",
                f"{part.bytes:,}",
                f"{part.withdrawn:,}",
                f"{part.deleted:,}",
            )
        )
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = [f"{plain(report.pool)}{' (dry run: nothing is changed)' if report.dry_run else ''}"]
    for row in rows:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += _limit_lines(report)
    would = "would be " if report.dry_run else ""
    withdrawn = ", ".join(f"{count:,} for {reason}" for reason, count in sorted(report.withdrawn.items()))
    for count, words in (
        (report.found, f"objects without a claim {would}claimed"),
        (report.waiting, "objects without a claim are too young to judge"),
        (report.mended_blocks, f"blocks {would}claimed again beside others of their object"),
        (report.missing_blocks, f"claimed blocks in no object, {would}withdrawn"),
        (sum(report.withdrawn.values()), f"objects {would}withdrawn: {withdrawn}"),
        (report.used, "objects were used before they were withdrawn, and stay"),
        (report.kept, "withdrawn objects were claimed again, and stay"),
        (report.deleted, "objects deleted"),
        (report.undeleted, "objects the store did not delete; the next run tries again"),
        (report.foreign, f"objects are none of this pool and were left alone, the first {plain(report.first_foreign)}"),
        (report.unknown, "objects the store did not tell of"),
        (
            report.future_blocks,
            "blocks were claimed by a clock that is ahead of the store's; set that instance's clock",
        ),
        (report.lists, f"lists left by an earlier janitor {would}finished"),
    ):
        if count:
            lines.append(f"{count:,} {words}")
    return "\n".join(lines)


def _limit_lines(report: Report) -> Iterator[str]:
    """What each tenant, and the pool, has of what it may have."""
    told = [
        ("all other tenants together" if tenant == OTHERS else f"tenant {plain(tenant) or '-'}", limit)
        for tenant, limit in sorted(report.limits.items())
    ]
    if report.pool_limit is not None:
        told.append(("the whole pool", report.pool_limit))
    for who, limit in told:
        yield f"{who}: {limit.bytes:,} bytes; the limit is {limit.limit_bytes:,}"
