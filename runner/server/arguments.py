"""The arguments of `exeplan serve`, and the server that they start.

Imports nothing heavy before `run_server`, so that `--help` is instant.
"""

import argparse
import os
import signal
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=Path, metavar="PLAN")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free port")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="run the plan's workers on the nodes of this Ray cluster (HOST:PORT), or of the one that this host is in "
        "(auto); default: on this host",
    )
    parser.add_argument(
        "--front-ends",
        type=int,
        default=1,
        metavar="N",
        help="answer HTTP on N nodes of the Ray cluster, this host among them, with the same replicas (default 1)",
    )
    parser.add_argument(
        "--replicas",
        metavar="MIN:MAX",
        help="have the number of replicas follow the load, by what each serves within the plan's bounds (default: the "
        "plan's replicas)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="required from clients (default: $EXEPLAN_API_KEY, or none)")
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="keys with names, weights and limits, in YAML that only its owner may read; SIGHUP reads it again",
    )
    parser.add_argument(
        "--max-queue", type=int, metavar="N", help="waiting requests before 429 (default: from the plan)"
    )
    parser.add_argument(
        "--admission",
        default="queue",
        help="refuse-late: also refuse at once (429) a request that would exceed the plan's bounds, its wait included "
        "(default: queue)",
    )
    parser.add_argument(
        "--generation-config",
        default="auto",
        metavar="MODE",
        help="auto (default): sampling defaults, for fields that a request leaves out, are those of the model's "
        "generation_config.json; none: they are not",
    )
    parser.add_argument(
        "--request-timeout",
        default="10min",
        metavar="TIME",
        help="end a request with 504 after it (default 10min)",
    )
    parser.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allow pages of this origin, such as https://chat.example.org, to use the server; may be repeated",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer requests to this name, such as llm.example.org, or to any (*); may be repeated (default: loopback "
        "names and the --host)",
    )
    parser.add_argument(
        "--trusted-proxy",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address or network of a proxy, whose X-Forwarded-For names the client that a request counts for; may be "
        "repeated (default: none)",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve https with this certificate (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="and this key (PEM); SIGHUP reads both again")
    parser.add_argument(
        "--replan",
        default="advise",
        metavar="MODE",
        help="off; advise (default): propose better plans when lengths drift, and plans for the devices left when a "
        "replica has lost some; auto: adopt them",
    )
    parser.add_argument(
        "--replan-dwell", default="60s", metavar="TIME", help="minimum time between two re-plans (default 60s)"
    )
    parser.add_argument(
        "--replan-file", type=Path, metavar="PLAN", help="where re-plans are written (default: PLAN-replanned.yaml)"
    )
    parser.add_argument(
        "--metrics-aliases",
        metavar="NAME",
        help="vllm: show the metrics that vLLM has too under its names as well, as autoscalers made for it ask",
    )
    parser.add_argument("--log-format", default="text", help="text (default) or json, one object per line")
    parser.add_argument("--log-level", default="info", help="debug, info (default), warning or error")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    parser.add_argument(
        "--model-dir", metavar="DIR", help="where the model is now, or its id on the Hub (default: as the plan says)"
    )
    parser.add_argument("--weights", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write a trace of the engine for Perfetto")
    parser.add_argument(
        "--deadline", metavar="TIME", help="a batch that takes longer means a hanging worker (default: from the plan)"
    )
    parser.add_argument(
        "--watch-speed",
        action="store_true",
        help="repeat the profile's reference passes (on CPUs): /metrics says how slow the machine is",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of each GPU's memory that may be used (default: the plan's, 0.9)",
    )
    parser.add_argument(
        "--drain", default="30s", metavar="TIME", help="time for running requests after SIGTERM or SIGINT"
    )


def run_server(args: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It would end this process before the server handles it.
    from exeplan.planner.load_problem import plan_model, read_plan
    from exeplan.progress import note
    from exeplan.runner.server.options import ServeOptions
    from exeplan.runner.server.server import serve
    from exeplan.scheduling.scaling import parse_replicas
    from exeplan.units import seconds, seconds_of_run

    options = ServeOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key if args.api_key is not None else os.environ.get("EXEPLAN_API_KEY") or None,
        api_keys=args.api_keys,
        max_queue=args.max_queue,
        admission=args.admission,
        generation_config=args.generation_config,
        request_seconds=seconds(args.request_timeout, "--request-timeout"),
        cors_origins=tuple(args.cors_origin),
        allowed_hosts=tuple(args.allowed_host),
        trusted_proxies=tuple(args.trusted_proxy),
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        served_model_name=args.served_model_name,
        dummy_weights=args.weights == "dummy",
        drain_seconds=seconds(args.drain, "--drain"),
        timeline=args.timeline,
        deadline_seconds=seconds_of_run(args.deadline, "--deadline") if args.deadline else None,
        ray=args.ray,
        front_ends=args.front_ends,
        replicas=parse_replicas(args.replicas) if args.replicas is not None else None,
        plan_file=args.plan,
        model_dir=args.model_dir,
        replan=args.replan,
        replan_dwell_seconds=seconds(args.replan_dwell, "--replan-dwell"),
        replan_file=args.replan_file,
        metrics_aliases=args.metrics_aliases,
        watch_speed=args.watch_speed,
        gpu_memory_utilization=args.gpu_memory_utilization,
        log_format=args.log_format,
        log_level=args.log_level,
    )
    plan = read_plan(args.plan, model=args.model_dir)
    spec = plan_model(plan)
    note(spec.remarks)
    return serve(plan, spec, options)
