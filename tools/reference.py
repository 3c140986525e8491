"""The reference pages of the documentation, written from the code they describe.

`tools/docs_hooks.py` puts them into the site.

python tools/reference.py FOLDER        writes them there as files, for a look
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from kvbm import catalog_cli, cli  # noqa: E402
from kvbm.catalog.answers import prompts, routed, token_prompts  # noqa: E402
from kvbm.catalog.edge import api, instance_detail, prompt_answers  # noqa: E402
from kvbm.catalog.edge.metrics import ROWS  # noqa: E402
from kvbm.catalog.edge.routes import openapi  # noqa: E402
from kvbm.config import ENVIRONMENT_PREFIX, Settings, SourceSettings, TenantSettings, default_lines  # noqa: E402
from kvbm.config.bounds import Bounds, bounds_of, shown  # noqa: E402
from kvbm.core import answers, overview  # noqa: E402
from kvbm.engines.vllm import numbers as vllm_numbers  # noqa: E402
from kvbm.manager.metrics import MANAGER_ROWS  # noqa: E402
from kvbm.telemetry.metrics import CatalogMetrics  # noqa: E402
from tools.python_page import python_page  # noqa: E402

_NAMES = re.compile(r"^(?P<names>[a-z_]+(?:, [a-z_]+)*): (?P<text>.*)$")
_INLINE = re.compile(r"`(?P<name>[a-z_]+)`: (?P<text>[^.]*)\.")
_UNITS = {"bytes_s": "bytes/s", "tokens_per_s": "tokens/s", "bytes": "bytes", "s": "seconds"}
_KINDS = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "tuple": "list", "dict": "table"}
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
_API_ERRORS = (prompts.ApiError.__name__, routed.NobodyServesError.__name__)
_COMMANDS = {
    "kvbm": ("demo", "simulate", "engine", "bench", "doctor", "probe", "nats-permissions", "keys", "settings"),
    "kvbm-catalog": ("serve", "gc", "erase"),
    "kvbm-replay": ("cat", "stat", "state", "verify", "diff", "rebuild", "export", "whatif", "serve"),
}


# -- docstrings -------------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """What a docstring says: its text without the list of attributes, and what it says of each."""

    text: str
    meanings: dict[str, str]


def described(kind: type) -> Described:
    """A class's docstring taken apart.

    An attribute's entry is `name: …` or `name, name: …` below "Attributes:"; also `` `name`: … `` in the text counts
    where there is no entry.
    """
    words = [line.strip() for line in (kind.__doc__ or "").strip().splitlines()]
    begin = words.index("Attributes:") if "Attributes:" in words else len(words)
    text = " ".join(word for word in words[:begin] if word)
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in words[begin + 1 :]:
        for one in _entries(line):
            entry = _NAMES.match(one)
            if entry is not None:
                names = entry["names"].split(", ")
                meanings.update(dict.fromkeys(names, entry["text"]))
            else:
                meanings.update({name: f"{meanings[name]} {one}".strip() for name in names})
    for inline in _INLINE.finditer(text):
        meanings.setdefault(inline["name"], inline["text"])
    return Described(text, meanings)


def _entries(line: str) -> list[str]:
    """A line of attributes; some have a second entry behind a full stop, as in `max_bytes: …. max_age_s: …`."""
    return [line] if not line else re.split(r"(?<=\.) (?=[a-z_]+(?:, [a-z_]+)*: )", line)


# -- markdown ---------------------------------------------------------------------------------------------------------


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip() or "–"


def _page(title: str, intro: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", intro, *(part.strip() for part in parts)]) + "\n"


def _sentence(text: str) -> str:
    text = text.strip()
    if text[:1].isalpha() and not text.startswith(("kvbm", "io_uring")):
        text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?")) else text + "."


# -- settings ---------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """One setting: its key, the kind of its value, its unit ("" where it has none), its default as TOML, its meaning,
    its bounds.
    """

    key: str
    kind: str
    unit: str
    default: str
    meaning: str
    allowed: str


def settings() -> Iterator[tuple[str, Described, list[Setting]]]:
    """Each table of settings by its key ("" for the outermost), with its docstring and its own settings."""
    yield from _tables(Settings(), "")
    yield "bridge.sources.NAME", described(SourceSettings), _own(SourceSettings(), "bridge.sources.NAME.")
    yield "tenants.NAME", described(TenantSettings), _own(TenantSettings(), "tenants.NAME.")


def _tables(group: Any, prefix: str) -> Iterator[tuple[str, Described, list[Setting]]]:
    own = _own(group, prefix)
    if own:
        yield prefix.rstrip("."), described(type(group)), own
    for field in msgspec.structs.fields(type(group)):
        value = getattr(group, field.name)
        if isinstance(value, msgspec.Struct):
            yield from _tables(value, f"{prefix}{field.name}.")


def _own(group: Any, prefix: str) -> list[Setting]:
    meanings = described(type(group)).meanings
    found = []
    for field in msgspec.structs.fields(type(group)):
        value = getattr(group, field.name)
        if isinstance(value, msgspec.Struct):
            continue
        bounds = bounds_of(type(group))[field.name]
        kind = _KINDS[bounds.kind.__name__]
        default = json.dumps(value, ensure_ascii=False)
        found.append(
            Setting(
                f"{prefix}{field.name}",
                kind,
                _unit(field.name),
                default,
                meanings.get(field.name, ""),
                _allowed(bounds),
            )
        )
    return found


def _allowed(bounds: Bounds) -> str:
    """What a value may be, as a cell; "" where it may be anything of its kind."""
    ends = (("at least", bounds.least), ("above", bounds.above), ("at most", bounds.most))
    words = [f"{word} {shown(end)}" for word, end in ends if end is not None]
    words[:] = [", ".join(words)] if words else []
    return " or ".join([*words, *(f"`{json.dumps(one)}`" for one in bounds.choice)])


def _unit(name: str) -> str:
    return next((unit for ending, unit in _UNITS.items() if name.endswith(f"_{ending}")), "")


def settings_page() -> str:
    """Every setting with its kind, default and meaning."""
    variable = f"{ENVIRONMENT_PREFIX}POOLS__HOST__SLOTS"
    parts = []
    for key, group, own in settings():
        rows = [
            (
                f"`{one.key}`",
                one.kind,
                f"`{one.default}`",
                one.allowed,
                _sentence(one.meaning) + (f" In {one.unit}." if one.unit else ""),
            )
            for one in own
        ]
        title = f"`{key}`" if key else "Outermost"
        parts.append(
            f"## {title}\n\n{_sentence(group.text)}\n\n{_table(('key', 'kind', 'default', 'allowed', 'meaning'), rows)}"
        )
    return _page(
        "Settings",
        "Settings come from a TOML file (`--config`). Environment variables override the file. `--set KEY=VALUE` "
        "overrides both. "
        f"The key `pools.host.slots` is a table in TOML and `{variable}` in the environment. A key that does not "
        "exist, or a value of "
        "the wrong kind, is refused at the start with the key's name. `kvbm settings` prints all of them as TOML.\n\n"
        "This page is generated from `kvbm/config/settings.py`.",
        *parts,
        "## All defaults as TOML\n\n```toml\n" + "\n".join(default_lines()) + "\n```",
    )


# -- metrics ----------------------------------------------------------------------------------------------------------


class Metric(NamedTuple):
    """One metric as it is scraped."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def catalog_metrics() -> list[Metric]:
    """What a catalog's /metrics has: the rows, and what is counted as requests come, from a scrape without rows."""
    from prometheus_client.parser import text_string_to_metric_families

    found = [Metric(row.scraped, row.kind, row.labels, row.help) for row in ROWS]
    metrics = CatalogMetrics((), None, {})
    metrics.count_request("caller", "passed")
    metrics.answers[200] += 1
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        if not family.samples or family.name.endswith("_created"):
            continue
        labels = {label: None for sample in family.samples for label in sample.labels if label != "le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found.append(Metric(name, family.type, tuple(labels), family.documentation))
    return found


def manager_metrics() -> list[Metric]:
    """What `kvbm.serve_metrics` has of a manager: the rows, each with the name of the instance."""
    return [Metric(row.scraped, row.kind, ("instance", *row.labels), row.help) for row in MANAGER_ROWS]


def vllm_metrics() -> list[Metric]:
    """What the connector adds to vLLM's /metrics."""
    found = [Metric(f"kvbm_vllm_{name}_total", "counter", (), text) for name, text in vllm_numbers.COUNTERS.items()]
    found += [
        Metric(f"kvbm_vllm_{name}_total", "counter", ("tier",), text)
        for name, text in vllm_numbers.COUNTERS_BY_TIER.items()
    ]
    found += [
        Metric(f"kvbm_vllm_{name}_total", "counter", ("why",), text)
        for name, text in vllm_numbers.COUNTERS_BY_WHY.items()
    ]
    found += [Metric(f"kvbm_vllm_{name}", "gauge", (), text) for name, text in vllm_numbers.GAUGES.items()]
    found += [Metric(f"kvbm_vllm_{name}", "histogram", (), text) for name, text in vllm_numbers.TIMES.items()]
    return found


def metrics_page() -> str:
    """Every metric with its kind, labels and meaning."""

    def table(metrics: Iterable[Metric]) -> str:
        rows = [
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.meaning) for one in metrics
        ]
        return _table(("metric", "kind", "labels", "meaning"), rows)

    from kvbm.manager.stats import ManagerStats

    stats = described(ManagerStats)
    rows = [(f"`{name}`", _sentence(stats.meanings.get(name, name.replace("_", " ")))) for name in ManagerStats._fields]
    return _page(
        "Metrics",
        "Metrics are in Prometheus' text format. Which of them to watch: [Monitor](../monitor.md).\n\n"
        "This page is generated from `kvbm/catalog/edge/metrics.py`, `kvbm/telemetry/metrics.py`, "
        "`kvbm/manager/metrics.py` and `kvbm/engines/vllm/numbers.py`.",
        "## The catalog\n\nAt `/metrics` of `kvbm-catalog serve`.\n\n" + table(catalog_metrics()),
        "## Inside vLLM\n\nAt `/metrics` of `vllm serve`, with vLLM's labels `engine` and `model_name`. The same "
        "numbers are in vLLM's "
        "log line `KV Transfer metrics`.\n\n" + table(vllm_metrics()),
        "## A manager\n\nAt `/metrics` of `kvbm.serve_metrics(manager)`, or where a program serves its own with "
        "`kvbm.metrics_collector(manager)`: [Embed](../embed.md#metrics).\n\n" + table(manager_metrics()),
        "## Embedded\n\n`manager.stats()` gives these numbers to the program that embeds kvbm. Its fields:\n\n"
        + _table(("field", "meaning"), rows),
    )


# -- HTTP -------------------------------------------------------------------------------------------------------------


def http_page() -> str:
    """Every path of the catalog's HTTP side, with its requests, answers and errors."""
    spec = openapi()
    structs = {
        name: kind for module in (answers, overview) for name, kind in vars(module).items() if isinstance(kind, type)
    }
    schemas = spec["components"]["schemas"]
    parts, used = [], []
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            part = f"## `{method.upper()} {path}`\n\n{operation['summary']}\n"
            body = operation.get("requestBody")
            for name, media in (("Request", body), ("Answer", operation["responses"]["200"])):
                schema = _schema_of(media)
                if schema:
                    part += f"\n{name}: [`{schema}`](#{schema.lower()})\n"
                    used.append(schema)
            for kind, example in _examples(body):
                part += f"\nExample, {kind}:\n\n```json\n{_spread(example)}\n```\n"
            errors = [(code, one["description"]) for code, one in operation["responses"].items() if code != "200"]
            if errors:
                part += "\n" + _table(("status", "when"), errors)
            parts.append(part)
    fields = []
    for name in sorted(schemas):
        kind = structs.get(name)
        known = described(kind) if kind else Described(schemas[name].get("description", ""), {})
        rows = [
            (
                f"`{field}`",
                _kind(schema),
                "yes" if field in schemas[name].get("required", ()) else "no",
                _sentence(known.meanings.get(field, "")),
            )
            for field, schema in schemas[name].get("properties", {}).items()
        ]
        fields.append(
            f"### {name}\n\n{_sentence(known.text)}\n\n{_table(('field', 'kind', 'required', 'meaning'), rows)}"
        )
    codes = [(f"`{code}`", str(status), f"`{where}`") for code, status, where in error_codes()]
    return _page(
        "HTTP",
        "The catalog answers JSON over HTTP at `catalog.listen`. It describes itself at `/openapi.json`. Hashes and "
        "ids are 32 hex "
        "digits. Unknown fields of a request are refused. How a router uses it: [Route](../route.md).\n\n"
        "This page is generated from `kvbm/catalog/edge/routes.py`, `api.py`, `prompts.py` and "
        "`prompt_answers.py` beside it, and "
        "`kvbm/core/answers.py` and `overview.py`.",
        *parts,
        "## Errors\n\nEvery answer that is not a success has the body [`ErrorAnswer`](#erroranswer): a constant `code` "
        "for programs, a "
        "sentence, and what to do.\n\n" + _table(("code", "status", "raised in"), codes),
        "## Bodies\n\n" + "\n".join(fields),
    )


def _spread(example: dict[str, Any]) -> str:
    """An object as JSON, a line a field."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in example.items())
    return f"{{\n{lines}\n}}"


def error_codes() -> list[tuple[str, int, str]]:
    """Codes of errors with their status and the function that raises them, from the source."""
    found: dict[str, tuple[int, str]] = {}
    functions = [
        node
        for module in (api, instance_detail, prompt_answers, prompts, routed, token_prompts)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
    ]
    for function in functions:
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _API_ERRORS:
                status, code = call.args[:2]
                if isinstance(status, ast.Constant) and isinstance(code, ast.Constant):
                    found.setdefault(str(code.value), (int(status.value), function.name))  # type: ignore[arg-type]
    return [(code, *found[code]) for code in sorted(found)]


def _schema_of(media: dict[str, Any] | None) -> str:
    if not media:
        return ""
    content = next(iter(media["content"].values()))
    return str(content["schema"].get("$ref", "")).rpartition("/")[2]


def _examples(body: dict[str, Any] | None) -> list[tuple[str, Any]]:
    if not body:
        return []
    content = next(iter(body["content"].values()))
    return [(name, one["value"]) for name, one in content.get("examples", {}).items()]


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


# -- logs -------------------------------------------------------------------------------------------------------------


class Logged(NamedTuple):
    """One kind of log line: name, level, names of its fields, what it always says to do or know, where it is
    written.
    """

    name: str
    level: str
    fields: tuple[str, ...]
    words: str
    module: str


def logged() -> list[Logged]:
    """Every `log.LEVEL("noun.verb_past", …)` of the package, and what `RateLimitedLog.warn` logs now and then."""
    found: dict[tuple[str, str, str], Logged] = {}
    for file in sorted((ROOT / "kvbm").rglob("*.py")):
        module = str(file.relative_to(ROOT))
        for call in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            is_seldom = call.func.attr in ("warn", "warn_once")
            is_log = isinstance(call.func.value, ast.Name) and call.func.value.id == "log" and call.func.attr in _LEVELS
            if not (is_log or is_seldom):
                continue
            fields = tuple(word.arg for word in call.keywords if word.arg and word.arg != "exc_info")
            words = "; ".join(
                str(word.value.value)
                for word in call.keywords
                if word.arg in ("remedy", "notice") and isinstance(word.value, ast.Constant)
            )
            for name in _constants(call.args[0]):
                level = "warning" if is_seldom else "error" if call.func.attr == "exception" else call.func.attr
                found[name, level, module] = Logged(name, level, fields, words, module)
    return sorted(found.values())


def _constants(name: ast.expr) -> list[str]:
    """The names a line may have: one, or the two of a choice."""
    if isinstance(name, ast.IfExp):
        return [*_constants(name.body), *_constants(name.orelse)]
    return [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []


def logs_page() -> str:
    """Every kind of log line."""
    rows = [
        (f"`{one.name}`", one.level, ", ".join(f"`{field}`" for field in one.fields), one.words, f"`{one.module}`")
        for one in logged()
    ]
    return _page(
        "Logs",
        "A log line is a constant `noun.verb_past` and fields. It goes to standard error, or to vLLM's log inside "
        "vLLM. Logs are "
        "remarks for people: programs read events, metrics and HTTP. A `warning` names what to do; an `error` needs "
        "somebody.\n\n"
        "This page is generated from the calls in the code. “Always says” is the constant part of a line's `remedy` or "
        "`notice`.",
        _table(("line", "level", "fields", "always says", "written in"), rows),
    )


# -- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """What `--help` says of every command."""
    parts = []
    for program, commands in _COMMANDS.items():
        for words in ((), *((command,) for command in commands)):
            text = _help(program, words)
            parts.append(f"{'###' if words else '##'} `{' '.join((program, *words))}`\n\n```text\n{text.rstrip()}\n```")
    return _page("Commands", "What `--help` says of each command.", *parts)


def _help(program: str, words: tuple[str, ...]) -> str:
    """A command's help, 100 columns wide."""
    main = {"kvbm": cli.main, "kvbm-catalog": catalog_cli.catalog_main, "kvbm-replay": cli.replay_main}[program]
    out = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with redirect_stdout(out), suppress(SystemExit):
            main([*words, "--help"])
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return out.getvalue()


PAGES: dict[str, Callable[[], str]] = {
    "reference/python.md": python_page,
    "reference/settings.md": settings_page,
    "reference/metrics.md": metrics_page,
    "reference/http.md": http_page,
    "reference/logs.md": logs_page,
    "reference/commands.md": commands_page,
}


def main() -> None:
    """Write the pages into a folder."""
    parser = argparse.ArgumentParser(description="Write the reference pages of the documentation into a folder.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    for name, page in PAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page())


if __name__ == "__main__":
    main()
