"""`kvbm …`, `kvbm-catalog …` and `kvbm-replay …`: arguments in, words out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.accounts_cli import add_keys, add_permissions, make_key, print_permissions
from kvbm.assembly import (
    NATIVE,
    NATIVE_AGES,
    NATIVE_FOLD,
    NATIVE_INDEX,
    NATIVE_STAYS,
    catalog_client,
    catalog_clients,
    catalog_credentials,
    decode_columns,
    kvbm_version,
)
from kvbm.catalog_cli import catalog_main, catalog_parser
from kvbm.command_line import (
    CommandParser,
    Commands,
    add_command,
    add_completion,
    add_json,
    add_report,
    add_settings,
    apply_logs,
    count_between,
    read_settings,
    reads,
    run_command,
    say_completion,
    seconds,
    settings_of,
    start_logs,
)
from kvbm.config import default_lines, defaults
from kvbm.core.errors import ConfigError
from kvbm.locate.http import CatalogClient
from kvbm.locate.parts import PartedCatalog
from kvbm.reports import words_aside
from kvbm.terminal import as_json, say, say_error
from kvbm_ledger.hang_ups import HANG_UPS

if TYPE_CHECKING:
    from kvbm.bench.virtual_time.compare_policies import CompareOptions
    from kvbm.streams.nats.credentials import Credentials


def main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm` command. Returns 0, 1 when a check failed, 2 when it could not start."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["catalog"]:
        return catalog_main(arguments[1:])
    if arguments[:1] == ["replay"]:
        return replay_main(arguments[1:])
    return run_command(_dispatch, kvbm_parser().parse_args(arguments), "kvbm")


def kvbm_parser() -> argparse.ArgumentParser:
    """What `kvbm` takes."""
    parser: argparse.ArgumentParser = CommandParser(
        prog="kvbm",
        description="An event-sourced lifecycle manager for the KV-cache blocks of LLM inference.",
        epilog="`kvbm COMMAND --help` says more. A command returns 0 when all is well, 1 when a check failed, 2 when "
        "it cannot "
        "start, 130 when interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"kvbm {kvbm_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_simulate(commands)
    _add_engine(commands)
    _add_bench(commands)
    _add_doctor(commands)
    _add_probe(commands)
    _add_bridge(commands)
    commands.add_parser("catalog", help="same as kvbm-catalog: the cluster-wide view of which block lies where")
    commands.add_parser("replay", help="same as kvbm-replay: what a stream of events says, and whether it is true")
    add_permissions(commands)
    add_keys(commands)
    add_json(add_command(commands, "settings", "print every setting with its default, as TOML"))
    add_completion(commands, "kvbm")
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    """What `kvbm` takes, with what `kvbm catalog` and `kvbm replay` hand on."""
    from kvbm.replay.cli import replay_parser

    parser = kvbm_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.choices.update({"catalog": catalog_parser(), "replay": replay_parser(kvbm_version())})
    return parser


def _add_bridge(commands: Commands) -> None:
    bridge = add_command(
        commands,
        "bridge",
        "bring the KV events of engines without our code (vLLM, SGLang, TensorRT-LLM, Dynamo) to the stream, so that "
        "catalogs know what they hold",
        "kvbm bridge --set bridge.sources.a.endpoint=tcp://10.0.0.1:5557 --set "
        "bridge.sources.a.replay=tcp://10.0.0.1:5558 "
        "--set bridge.sources.a.model=meta-llama/Llama-3.1-8B",
    )
    add_settings(bridge)


def replay_main(argv: Sequence[str] | None = None) -> int:
    """The `kvbm-replay` command."""
    from kvbm.assembly.readable import readable_parts
    from kvbm.replay.cli import Parts
    from kvbm.replay.cli import main as replay
    from kvbm.workload.trace import read_trace

    try:
        start_logs()
    except ConfigError as error:
        say_error("kvbm-replay", error)
        return 2
    parts = Parts(
        NATIVE,
        NATIVE_FOLD,
        decode_columns,
        NATIVE_INDEX,
        NATIVE_AGES,
        NATIVE_STAYS,
        _replay_catalog,
        read_trace,
        _replay_credentials,
        kvbm_version(),
        readable_parts,
    )
    return replay(list(sys.argv[1:] if argv is None else argv), parts)


def _add_demo(commands: Commands) -> None:
    demo = add_command(
        commands,
        "demo",
        "run engines, tiers, stream, catalog and replay once on embedded servers; 1 when any check of the outcome "
        "fails",
        "kvbm demo --json demo.json --keep demo-files",
    )
    add_report(demo)
    demo.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep journals, pools and logs in this folder, which must be new"
    )


def _add_simulate(commands: Commands) -> None:
    simulate = add_command(
        commands,
        "simulate",
        "drive several managers with a trace: synthetic bytes, real events, a real catalog that routes; or compare "
        "ways of routing",
        "kvbm simulate --trace conversation_trace.jsonl --instances 4 --pools hbm=12500 --json sim.json",
    )
    simulate.add_argument(
        "--trace", type=Path, metavar="FILE", help="Mooncake's JSONL; without it, a generated workload"
    )
    simulate.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help="requests of the generated workload (default 2000; with --policy 4000 of each)",
    )
    simulate.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="N",
        help="seed of the generated workload and of random routing (default 1)",
    )
    simulate.add_argument("--instances", type=int, default=4, metavar="N", help="how many managers (default 4)")
    simulate.add_argument(
        "--pools",
        metavar="TIER=SLOTS,…",
        help='slots of each instance, such as "hbm=4000,host=8500", or "unbounded" (default hbm=12500; with --policy '
        "hbm=4000; "
        "with --fetch hbm=1000,host=4000, and object=SLOTS of a store that all share)",
    )
    add_report(simulate)
    policies = simulate.add_argument_group(
        "compare ways of routing, in virtual time, without bytes and servers; needs a checkout"
    )
    policies.add_argument(
        "--policy",
        type=_names,
        metavar="NAME,…",
        help='of kvbm, random, prefix+load, dynamo and llm-d, or "all"; all run on the same requests',
    )
    policies.add_argument(
        "--workload",
        type=_names,
        metavar="NAME,…",
        help='of conversation, tool-agents, shared-prompts and long-documents, or "all" (default; with --fetch '
        "conversation)",
    )
    policies.add_argument(
        "--load",
        type=_names,
        default=("normal", "overload"),
        metavar="NAME,…",
        help="of light, normal and overload (default normal,overload)",
    )
    policies.add_argument(
        "--seeds", type=_numbers, metavar="N,…", help="a row is the mean over these (default the one of --seed)"
    )
    policies.add_argument(
        "--speeds",
        type=_speeds,
        metavar="TOKENS,…",
        help="tokens each instance prefills in a second (default 10000 each)",
    )
    policies.add_argument(
        "--change",
        metavar="TIME:INSTANCE:WHAT,…",
        help="what becomes of an instance, counted from 0, in the middle of each run: its speed or slots times a "
        "number, or it is drained, such as 60:1:speed=0.25,60:2:slots=0.5,90:3:drain",
    )
    _add_fetch(simulate)


def _add_fetch(simulate: argparse.ArgumentParser) -> None:
    """The group of options of `kvbm simulate --fetch`."""
    fetch = simulate.add_argument_group(
        "read blocks from other instances' HOST and NVME, in virtual time, without bytes and servers; needs a checkout"
    )
    fetch.add_argument(
        "--fetch",
        action="store_true",
        help="run the same requests without and with it, side by side; --policy says by which routing (default kvbm)",
    )
    fetch.add_argument(
        "--fetch-link",
        metavar="GB/S[,US]",
        help="--fetch, over links that are all so fast, with so many microseconds of latency (default 300); "
        "without it, as managers assume for the distance",
    )
    fetch.add_argument(
        "--topology",
        type=_names,
        metavar="LABELS,…",
        help="place of each instance, such as zone-a/rack-3/host-17 (default hosts of one rack)",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _speeds(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _add_engine(commands: Commands) -> None:
    engine = add_command(
        commands,
        "engine",
        "run the demo's engine, a small transformer, as a process: requests in and answers out as JSON lines",
        "kvbm engine --set pools.hbm.slots=256 --set pools.nvme.slots=1024 --set instance.id=engine-a",
    )
    engine.add_argument("--threads", type=_thread_count, default=1, metavar="N", help="torch threads (default 1)")
    engine.add_argument(
        "--weights",
        default="",
        metavar="FILE",
        help="weights to load (made by Weights.save); without it, random ones from a fixed seed",
    )
    add_settings(engine)


def _add_bench(commands: Commands) -> None:
    bench = add_command(
        commands,
        "bench",
        "measure the native core, the pools, and the line from instance to catalog, on this machine; needs a checkout",
        "kvbm bench index --live 1000000 --live 10000000 --replacements 10 --json index.json",
    )
    bench.add_argument(
        "what",
        choices=[
            "hash",
            "codec",
            "ledger",
            "events",
            "index",
            "replay",
            "history",
            "bridge",
            "ingest",
            "sql",
            "stream",
            "catalog",
            "connector",
            "pools",
            "fetch",
            "page",
            "all",
        ],
        help="which part; pools: NVME, HOST, HBM, metadata, lossless coding of KV; fetch: blocks from another "
        "instance's memory; page: the catalog's page in Chromium, which is not of all",
    )
    bench.add_argument(
        "--live",
        type=_live_count,
        action="append",
        metavar="N",
        help="residencies the index or a history holds, or claims SQL takes; may be given several times "
        "(default 1000000)",
    )
    bench.add_argument(
        "--replacements",
        type=_small_count,
        default=3,
        metavar="N",
        help="how often the whole set is replaced to see whether memory grows; 0 leaves it out (default 3)",
    )
    bench.add_argument(
        "--samples", type=_sample_count, metavar="N", help="of each number; of pools, pairs (default 7; pools alone 5)"
    )
    bench.add_argument("--seed", type=int, default=1, metavar="N", help="of the workload (default 1)")
    bench.add_argument(
        "--instances",
        type=_instance_count,
        metavar="N",
        help="of catalog: how many share a prefix (default 10000); of page: how many there are (default 3000)",
    )
    bench.add_argument(
        "--checkpoint",
        action="store_true",
        help="of catalog: also the longest frame while a checkpoint of 50 M residencies is written; takes 5 GB",
    )
    bench.add_argument(
        "--events",
        type=_live_count,
        metavar="N",
        help="of page: blocks named in events of the archive (default twice --live)",
    )
    bench.add_argument(
        "--dir",
        type=Path,
        metavar="FOLDER",
        help="of pools: on the device to measure; the files made there go afterwards (default: tmp in the data folder)",
    )
    bench.add_argument(
        "--file-mib",
        type=_file_mib,
        default=2048,
        metavar="N",
        help="of pools: size of the pool's file, which fio works on too (default 2048)",
    )
    bench.add_argument(
        "--read-mib",
        type=_read_mib,
        default=128,
        metavar="N",
        help="of fetch: size of one large read, larger than the processor's caches (default 128)",
    )
    bench.add_argument(
        "--s3",
        metavar="URL",
        help="of pools: s3://bucket/prefix of a store to put objects into, and delete them again; credentials from the "
        "environment",
    )
    bench.add_argument("--endpoint", default="", metavar="URL", help="of --s3, where it is not Amazon's")
    add_report(bench)


def _add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        "check this machine against a configuration and say what to fix",
        "kvbm doctor --config kvbm.toml --block-bytes 2097152",
    )
    doctor.description = (
        "Check this machine against a configuration and say what to fix: CPU, memory, CUDA, io_uring, disks, clock, "
        "and that NATS, "
        "SQL, object store and catalog can be reached and used. What is not configured is not used, and no problem. It "
        "returns 1 "
        "when there is a problem. Nothing is left behind; no check takes longer than 5 seconds."
    )
    doctor.add_argument(
        "--block-bytes",
        type=_block_bytes,
        default=0,
        metavar="N",
        help="bytes of one block, so that slots can be held against memory and disks",
    )
    doctor.add_argument(
        "--quick", action="store_true", help="measure neither speeds nor syncs of disks, and do not try NIXL"
    )
    doctor.add_argument(
        "--json",
        nargs="?",
        const="-",
        default="",
        metavar="FILE",
        help="JSON to a file, or to standard output instead of words",
    )
    add_settings(doctor)


def _add_probe(commands: Commands) -> None:
    probe = add_command(
        commands,
        "probe",
        "ask whether NATS, a database or an HTTP service answers: for health checks, and to wait for one",
        "kvbm probe nats://127.0.0.1:4222 --wait 30",
    )
    probe.add_argument("url", metavar="URL", help="nats://…, http://…, https://… or postgresql://…")
    probe.add_argument(
        "--wait", type=seconds, default=0.0, metavar="S", help="ask again for so many seconds (default: once)"
    )
    probe.add_argument(
        "--strict", action="store_true", help="return 1 also where a catalog is ready and degraded (default: 0)"
    )
    add_json(probe)
    add_settings(probe)


def _block_bytes(text: str) -> int:
    return count_between(text, 1, 1 << 40)


def _live_count(text: str) -> int:
    return count_between(text, 100_000, 1_000_000_000)


def _file_mib(text: str) -> int:
    return count_between(text, 16, 1 << 24)


def _read_mib(text: str) -> int:
    return count_between(text, 1, 8192)


def _small_count(text: str) -> int:
    return count_between(text, 0, 1000)


def _sample_count(text: str) -> int:
    return count_between(text, 2, 1000)


def _instance_count(text: str) -> int:
    return count_between(text, 100, 100_000)


def _thread_count(text: str) -> int:
    """A number of threads; argparse names the option. Raises ArgumentTypeError."""
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to 1024")
    return int(text)


def _dispatch(arguments: argparse.Namespace) -> int:
    with words_aside(getattr(arguments, "json", None)):
        return _done(arguments)


def _done(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "demo":
            from kvbm.workload.processes import CATALOG_MODULES, STORE_MODULES, require_modules

            require_modules("kvbm demo", ("torch", "boto3", *CATALOG_MODULES, *STORE_MODULES), "demo")
            from kvbm.demo import run as demo

            return demo.main(arguments.json, arguments.keep)
        case "simulate":
            from kvbm.workload import simulate

            if arguments.fetch or arguments.fetch_link is not None:
                return _compare_fetch(arguments)
            if arguments.topology is not None:
                raise ConfigError("--topology says how far apart instances read from each other; give --fetch, too")
            if arguments.policy is not None:
                return _compare_policies(arguments)
            return simulate.main(
                arguments.trace,
                2000 if arguments.requests is None else arguments.requests,
                arguments.seed,
                arguments.instances,
                "hbm=12500" if arguments.pools is None else arguments.pools,
                arguments.json,
            )
        case "keys":
            return make_key(arguments)
        case "bench":
            _require_checkout("kvbm bench")
            from kvbm.bench import BenchOptions, FetchOptions, ObjectsOptions, PageOptions, PoolsOptions, run_bench

            live = tuple(arguments.live or (1_000_000,))
            samples = arguments.samples or (5 if arguments.what == "pools" else 7)
            objects = ObjectsOptions(arguments.s3, arguments.endpoint) if arguments.s3 else None
            pools = PoolsOptions(arguments.dir, arguments.file_mib << 20, objects=objects)
            options = BenchOptions(
                arguments.what,
                live,
                arguments.replacements,
                samples,
                arguments.seed,
                pools,
                arguments.instances or 10_000,
                max(arguments.live or (10_000_000,)),
                arguments.checkpoint,
                FetchOptions(arguments.read_mib << 20),
                PageOptions(arguments.instances or 3000, arguments.events or 0),
            )
            return run_bench(options, arguments.json)
        case "doctor":
            settings = settings_of(arguments)
            from kvbm import doctor

            wanted = doctor.DoctorOptions(arguments.block_bytes, arguments.quick, arguments.json)
            return doctor.main(settings, wanted)
        case "probe":
            from kvbm.workload import probe

            return probe.main(arguments.url, arguments.wait, settings_of(arguments), arguments.json, arguments.strict)
        case "bridge":
            from kvbm.assembly.bridge import run_bridge
            from kvbm.assembly.reload import Reloads, takes_logs

            HANG_UPS.install()  # as the program has done, where it was started by that
            settings = settings_of(arguments)
            return run_bridge(settings, reloads=Reloads(settings, reads(arguments), takes_logs, apply_logs))
        case "nats-permissions":
            return print_permissions(arguments)
        case "engine":
            settings = settings_of(arguments)  # first, because torch takes seconds to load
            from kvbm.demo.engine.worker import WorkerSettings
            from kvbm.demo.engine.worker import main as serve

            worker = WorkerSettings(threads=arguments.threads, weights_path=arguments.weights)
            return serve(settings, worker)
        case "completion":
            return say_completion(_whole_parser(), arguments)
        case _:
            say(*([as_json(defaults())] if arguments.json else default_lines()))
            return 0


def _require_checkout(what: str) -> None:
    """Refuse a command whose modules wheels leave out. Raises ConfigError: this kvbm was installed from a wheel."""
    from kvbm.workload.processes import is_installed

    if not is_installed("kvbm.bench"):
        raise ConfigError(
            f"{what} runs from a checkout of the repository, after `make setup` there; an installed wheel leaves out "
            "what measures "
            "and compares"
        )


def _compare_policies(arguments: argparse.Namespace) -> int:
    """`kvbm simulate --policy`."""
    _require_checkout("kvbm simulate --policy")
    from kvbm.bench.virtual_time import compare_policies
    from kvbm.bench.virtual_time.changes import parse_changes
    from kvbm.bench.virtual_time.workloads import WORKLOADS
    from kvbm.workload.simulate import parse_pools

    pools = parse_pools("hbm=4000" if arguments.pools is None else arguments.pools)
    if set(pools) != {"hbm"}:
        raise ConfigError(
            f"--pools {arguments.pools!r}: --policy without --fetch compares with an HBM pool alone; give hbm=SLOTS"
        )
    options = _compare_options(arguments, tuple(WORKLOADS))
    changes = () if arguments.change is None else parse_changes(arguments.change)
    return compare_policies.main(options._replace(slots=pools["hbm"], changes=changes), arguments.json)


def _compare_fetch(arguments: argparse.Namespace) -> int:
    """`kvbm simulate --fetch`."""
    _require_checkout("kvbm simulate --fetch")
    from kvbm.bench.virtual_time import compare_fetch
    from kvbm.workload.simulate import parse_pools

    pools = parse_pools("hbm=1000,host=4000" if arguments.pools is None else arguments.pools, compare_fetch.POOL_TIERS)
    options = _compare_options(arguments, ("conversation",))
    cluster = compare_fetch.cluster_of(pools, arguments.instances, arguments.topology, arguments.fetch_link)
    return compare_fetch.main(options, cluster, arguments.json)


def _compare_options(arguments: argparse.Namespace, workloads: tuple[str, ...]) -> CompareOptions:
    """What `--policy` and `--fetch` have in common. `workloads`: where none is named."""
    from kvbm.bench.virtual_time.compare_policies import PREFILL_TOKENS_PER_S, CompareOptions
    from kvbm.bench.virtual_time.policies import POLICIES
    from kvbm.bench.virtual_time.workloads import WORKLOADS

    if arguments.instances < 1:
        raise ConfigError(f"--instances {arguments.instances}: at least 1 is needed")
    policies = ("kvbm",) if arguments.policy is None else arguments.policy
    named = workloads if arguments.workload is None else arguments.workload
    return CompareOptions(
        policies=tuple(POLICIES) if policies == ("all",) else policies,
        workloads=tuple(WORKLOADS) if named == ("all",) else named,
        loads=arguments.load,
        seeds=arguments.seeds or (arguments.seed,),
        requests=4_000 if arguments.requests is None else arguments.requests,
        speeds=arguments.speeds or (PREFILL_TOKENS_PER_S,) * arguments.instances,
        trace=arguments.trace,
    )


def _replay_catalog(
    url: str, config: Path | None, sets: Sequence[str], timeout_s: float
) -> CatalogClient | PartedCatalog:
    settings = read_settings(config, sets)
    for one in url.split(";"):
        with closing(catalog_client(one, catalog_credentials(settings), timeout_s)) as client:
            client.metrics()  # who may not ask this is told of no counts, and would find the catalog behind everywhere
    return catalog_clients(settings, url, timeout_s)


def _replay_credentials(config: Path | None, sets: Sequence[str]) -> Credentials:
    from kvbm.assembly import stream_credentials
    from kvbm.streams.nats.permissions import Role

    return stream_credentials(read_settings(config, sets), Role.REPLAY)


if __name__ == "__main__":
    raise SystemExit(main())
