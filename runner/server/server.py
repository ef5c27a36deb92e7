"""`exeplan serve`: the OpenAI-compatible HTTP server of one plan.

This process speaks HTTP and never imports torch; the engine runs in a process of its own (`engine_process`), connected
by a pair of sockets, and so does each replica of a plan; two children read requests (`readers`). The responses are in
`views`, the start and the end in `lifecycle`.
Not here: several models; put a proxy in front.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace as with_fields

from exeplan.core.batch import BLOCK_SIZE
from exeplan.core.models.model import ModelSpec
from exeplan.core.plan import Plan, as_json, single_plans, with_utilization
from exeplan.core.profile import ReferencePass, load_profile
from exeplan.core.runs.machine_speed import why_none
from exeplan.core.schedule import ROUTERS, num_devices
from exeplan.drift.state import Rules
from exeplan.errors import InputError
from exeplan.forked import num_processes
from exeplan.planner.load_problem import profile_for
from exeplan.runner import logs
from exeplan.runner.engine.chat_template import UNKNOWN_TOOL_FORMAT
from exeplan.runner.engine.tokenizer import NO_TOKENIZER, Tokenizer
from exeplan.runner.engine_process.build import engine_setup, model_source
from exeplan.runner.engine_process.client import EngineClient
from exeplan.runner.engine_process.job import EngineError
from exeplan.runner.engine_process.replicas import ReplicaSet
from exeplan.runner.ipc.front_end_messages import FrontEndOptions, FrontEndPlaced, FrontEndSetup, PlaceFrontEnds
from exeplan.runner.ipc.messages import EngineSetup, RaySetup
from exeplan.runner.replan.replanner import Replanner
from exeplan.runner.server.admission import Admission, default_max_queue
from exeplan.runner.server.front_ends.owner import FrontEnds
from exeplan.runner.server.lifecycle import serve_until_stopped
from exeplan.runner.server.network.api_keys import ApiKeys
from exeplan.runner.server.network.hosts import Hosts
from exeplan.runner.server.network.listener import open_listener
from exeplan.runner.server.network.tls import Tls
from exeplan.runner.server.notify import notify
from exeplan.runner.server.options import ServeOptions
from exeplan.runner.server.read_again import read_again
from exeplan.runner.server.routes import build_app, build_views
from exeplan.runner.server.sampling_defaults import sampling_defaults
from exeplan.runner.server.scaler import Limits, Scaler, limits_of
from exeplan.runner.server.service import Service, few_at_once, summary

log = logging.getLogger(__name__)


def serve(
    plan: Plan, spec: ModelSpec, options: ServeOptions, *, on_ready: Callable[[str], None] = lambda url: None
) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status: 0, or 1 when the engine has failed.

    It listens from the start. When the model is loaded and requests are answered, one summary line is printed (with
    JSON logs it is a record) and `on_ready` gets the base URL. Raises InputError for what a user can correct: a port in
    use, a model that cannot be loaded.
    """
    logs.configure(options.log_format, options.log_level)
    plan = with_utilization(plan, options.gpu_memory_utilization)
    defaults = sampling_defaults(spec) if options.generation_config == "auto" else {}
    if defaults:
        stated = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        log.info("sampling defaults of generation_config.json, for fields that a request leaves out: %s", stated)
    max_queue = options.max_queue or default_max_queue(plan)
    admission = Admission(plan, max_queue=max_queue, refuse_late=options.admission == "refuse-late")
    tokenizer = Tokenizer.load(spec)
    if (template := tokenizer.chat_template) and template.takes_tools and not template.tool_format:
        log.warning("%s", UNKNOWN_TOOL_FORMAT)
    if tokenizer.codec is None:
        log.warning("%s: prompts and outputs are token ids, and there are no chats", NO_TOKENIZER)
    if not options.ray and (sentence := _without_a_core(plan)):
        log.warning("%s", sentence)
    passes_of = _reference_passes(spec) if options.watch_speed else _none
    passes_of(plan)
    keys = ApiKeys(key=options.api_key, file=options.api_keys)
    host = options.host
    tls = Tls(options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
    limits = limits_of(plan, options.replicas, on_ray=bool(options.ray)) if options.replicas else None
    with open_listener(host, options.port) as listener:
        url = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

        async def run() -> int:
            setup = partial(_setup, spec=spec, options=options, passes_of=passes_of)
            engine = _engine(plan, setup, limits)
            service = Service(
                engine,
                tokenizer,
                admission,
                plan=plan,
                spec=spec,
                model_name=options.served_model_name or spec.name,
                request_seconds=options.request_seconds,
                plan_file=options.plan_file,
                metrics_aliases=options.metrics_aliases,
                sampling_defaults=defaults,
            )
            service.clients.count_from_now(keys.clients)
            if limits and isinstance(engine, ReplicaSet):
                service.scaler = Scaler(engine, limits, num_refused=service.num_refused)
            service.replanner = Replanner(
                engine,
                plan,
                spec,
                setup=setup,
                mode=options.replan,
                rules=Rules(dwell=options.replan_dwell_seconds),
                file=options.written_to,
                plan_file=options.plan_file,
                model=options.model_dir,
                gpu_memory_utilization=options.gpu_memory_utilization,
                follow_devices=limits is None,
                check=admission.check,
                on_adopted=service.switch_to,
            )
            front_ends = service.front_ends = _front_ends(service, keys, options) if options.front_ends > 1 else None
            read = read_again(keys, tls, service.clients)

            async def hang_up() -> None:
                await read()
                if front_ends:
                    front_ends.read_files_again()

            def listening() -> None:
                log.info("listening at %s while %s is loaded", url, service.model_name)
                notify(STATUS=f"loading {service.model_name}; {url}/ready reports the progress")

            def ready() -> None:
                line = summary(service, url)
                _announce(line, options)
                num_slots = engine.num_blocks * BLOCK_SIZE
                if sentence := few_at_once(plan, request_tokens=service.max_context, num_slots=num_slots):
                    log.warning("%s", sentence)
                notify(READY="1", STATUS=line)
                if front_ends:
                    front_ends.start()
                on_ready(url)

            hosts = Hosts(host, options.allowed_hosts)
            app = build_app(service, hosts, keys=keys, cors_origins=options.cors_origins)
            try:
                await serve_until_stopped(
                    app,
                    service,
                    listener,
                    drain_seconds=options.drain_seconds,
                    on_listening=listening,
                    on_ready=ready,
                    on_hangup=hang_up,
                    tls=tls.context if tls else None,
                    trusted_proxies=options.trusted_proxies,
                )
                return 1 if engine.failure else 0
            finally:
                if front_ends:
                    await front_ends.close()
                await service.close()

        try:
            return asyncio.run(run())
        except EngineError as error:  # The engine process has logged its traceback.
            log.error("%s", error)
            return 1


def _engine(plan: Plan, setup: Callable[[Plan], EngineSetup], limits: Limits | None) -> EngineClient | ReplicaSet:
    """The client of a plan's engine process, or of one for each replica; within the running event loop."""
    if plan.num_replicas == 1 and limits is None:
        return EngineClient(setup(plan))
    if plan.more_replicas and any(group.capacity is None for group in plan.groups):
        log.warning("the plan's replicas differ and do not all have a capacity: the router takes them for equally fast")
    singles = single_plans(plan)
    most = limits.most if limits else len(singles)
    setups = [_own(setup(singles[n if n < len(singles) else 0]), n) for n in range(most)]
    return ReplicaSet(setups, plan.router or ROUTERS[0], num_first=limits.least if limits else None)


def _without_a_core(plan: Plan) -> str:
    """That engines on CPUs leave no core of this machine to HTTP; '' where they do."""
    threads = plan.num_threads * sum(num_devices(one.placement) for one in single_plans(plan))
    if (plan.device or "cpu") != "cpu" or threads < num_processes():
        return ""
    return (
        f"the engines compute with {threads} threads on the {num_processes()} cores of this machine: HTTP, and clients "
        "here, take time from them that the plan does not count"
    )


def _own(setup: EngineSetup, number: int) -> EngineSetup:
    """A replica's setup with its number and a timeline of its own: `run.json` becomes `run-0.json`."""
    if setup.ray:
        setup = with_fields(setup, ray=with_fields(setup.ray, replica=number))
    if setup.timeline is None:
        return setup
    path = Path(setup.timeline)
    return with_fields(setup, timeline=str(path.with_stem(f"{path.stem}-{number}")))


def _front_ends(service: Service, keys: ApiKeys, options: ServeOptions) -> FrontEnds:
    """Those on other nodes; they get this server's options, and read its files on their own nodes."""
    spec, admission = service.spec, service.admission

    def setup(placed: FrontEndPlaced, plan: Plan) -> FrontEndSetup:
        return FrontEndSetup(
            address=placed.address,
            plan=as_json(plan),
            model=with_fields(model_source(spec), directory=placed.model_directory),
            options=FrontEndOptions(
                host=options.host,
                port=options.port,
                api_key=options.api_key,
                api_keys=_absolute(options.api_keys),
                cors_origins=options.cors_origins,
                allowed_hosts=options.allowed_hosts,
                trusted_proxies=options.trusted_proxies,
                tls_cert=_absolute(options.tls_cert),
                tls_key=_absolute(options.tls_key),
                max_queue=admission.max_queue,
                admission=options.admission,
                request_seconds=options.request_seconds,
                drain_seconds=options.drain_seconds,
                model_name=service.model_name,
                metrics_aliases=options.metrics_aliases,
                sampling_defaults=service.sampling_defaults,
                log_format=options.log_format,
                log_level=options.log_level,
            ),
        )

    assert options.ray
    placing = PlaceFrontEnds(
        address=options.ray, count=options.front_ends - 1, model=model_source(spec), fingerprint=spec.fingerprint
    )
    return FrontEnds(service, build_views(service, keys=keys), keys, placing=placing, setup=setup)


def _absolute(path: Path | None) -> str | None:
    return str(path.resolve()) if path else None


def _announce(line: str, options: ServeOptions) -> None:
    if options.log_format == "json":
        log.info("%s", line)
    else:
        print(line, flush=True)


PassesOf: TypeAlias = Callable[[Plan], tuple[ReferencePass, ...]]
"""Reference passes of a plan's profile."""


def _none(plan: Plan) -> tuple[ReferencePass, ...]:
    return ()


def _reference_passes(spec: ModelSpec) -> PassesOf:
    """By the profile of each plan and its threads, read once. Raises InputError where there are none, or none can be
    run."""

    @cache
    def read(profile: str, num_threads: int) -> tuple[ReferencePass, ...]:
        found = profile_for(spec, load_profile(Path(profile))).with_threads(num_threads).reference_passes
        if not found:
            raise InputError(f"--watch-speed: {profile} has no reference passes; make it with `exeplan profile`")
        return found

    def passes(plan: Plan) -> tuple[ReferencePass, ...]:
        if reason := why_none(plan.device or "cpu"):
            raise InputError(f"--watch-speed: {reason}")
        if plan.profile is None:
            raise InputError("--watch-speed compares the machine with the plan's profile, and the plan names none")
        return read(plan.profile, plan.num_threads)

    return passes


def _setup(plan: Plan, *, spec: ModelSpec, options: ServeOptions, passes_of: PassesOf) -> EngineSetup:
    """The setup of the engine process for a plan, the first one or a later one."""
    return engine_setup(
        plan,
        spec,
        dummy_weights=options.dummy_weights,
        timeline=options.timeline,
        deadline_seconds=options.deadline_seconds,
        ray=RaySetup(address=options.ray, replica=0) if options.ray else None,
        reference_passes=passes_of(plan),
    )
