"""Settings that are read again while a command runs: what of them is taken, and what waits for a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvbm.config import Settings, changed_keys, merged
from kvbm.core.errors import KvbmError
from kvbm.safe_log import SafeLog

log = SafeLog()


class NewSettings(NamedTuple):
    """What was read.

    Attributes:
        settings: to go on with: as before, but for what is taken.
        changed: keys of what is taken and differs. restart: keys of what differs and is not taken.
    """

    settings: Settings
    changed: list[str]
    restart: list[str]


class Reloads:
    """The settings of a running command.

    Args:
        settings: as it has started.
        read: reads them again. Raises ConfigError.
        takes: whether a key, such as "catalog.limits.burst", is taken while it runs, by its value before and the new
            one.
        on_taken: called with settings that were taken; it does not fail.

    Attributes:
        settings: that count now.
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        takes: Callable[[str, object, object], bool],
        on_taken: Callable[[Settings], None],
    ) -> None:
        self.settings = settings
        self._read, self._takes, self._on_taken = read, takes, on_taken

    def look(self) -> NewSettings:
        """Read them; nothing is taken yet. Raises ConfigError: they cannot be used."""
        found = self._read()
        settings = merged(self.settings, found, self._takes)
        changed, restart = changed_keys(self.settings, settings), changed_keys(settings, found)
        return NewSettings(settings, changed, restart)

    def take(self, new: NewSettings, more: tuple[str, ...] = ()) -> None:
        """These count from now on; say so.

        Args:
            more: keys whose values are as before, and whose files have changed.
        """
        self.settings = new.settings
        self._on_taken(new.settings)
        changed = [*new.changed, *(key for key in more if key not in new.changed)]
        if new.restart:
            log.warning(
                "settings.reloaded",
                changed=changed,
                needs_restart=new.restart,
                remedy="restart for what needs_restart names",
            )
        else:
            log.info("settings.reloaded", changed=changed, needs_restart=[])

    def keep(self, why: object) -> None:
        """Say that all is as before."""
        log.error("settings.kept", why=str(why), remedy="all is as before; correct it, then send SIGHUP again")

    def reload(self, check: Callable[[Settings], None] = lambda settings: None) -> None:
        """Look, and take what is right: for a command whose parts read the settings themselves.

        Args:
            check: what more the settings must pass. Raises ConfigError.
        """
        try:
            new = self.look()
            check(new.settings)
        except (KvbmError, OSError) as error:
            self.keep(error)
        else:
            self.take(new)


def takes_logs(key: str, before: object, after: object) -> bool:
    """Whether a key says how log lines are written, which every command takes while it runs."""
    return key.startswith("log.")
