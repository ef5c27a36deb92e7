"""One run of vidur on a trace, in vidur's own environment: its interpreter runs this file (`replay_peer.py` calls it).

    PYTHON benchmarks/planner/replay_vidur.py FOLDER --stages 1 --slots 256 --budget 1024 --blocks 1000000

Vidur has no package: that environment needs numpy, pandas, scikit-learn, fasteners, ddsketch, plotly_express and wandb,
and a .pth file that names a checkout. Vidur's own profiles are not used.

FOLDER holds the trace and profiles as vidur reads them, and caches its predictor. The predictor is a random forest as
vidur's own, of one grid point; it is trained, and its tables filled, before the clock starts. Metrics and traces are
off, which makes vidur faster than it comes. Prints one line of JSON: CPU seconds of the predictor and of the
simulation, and what was simulated. Not here: anything of exeplan, which that environment does not have.
"""

import argparse
import json
import os
import subprocess
import time
from pathlib import Path

MODEL, DEVICE, NETWORK = "meta-llama/Meta-Llama-3-8B", "a40", "a40_pairwise_nvlink"
LONGEST = 16_384
"""Tokens of the longest request for which vidur fills its tables."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--budget", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    args = parser.parse_args()
    from vidur.entities import Batch
    from vidur.simulator import Simulator

    began = time.process_time()
    simulator = Simulator(_configuration(args))
    trained = time.process_time()
    simulator.run()
    ended = time.process_time()
    answer = {
        "predictor seconds": trained - began,
        "seconds": ended - trained,
        "passes": Batch.generate_id(),
        "simulated seconds": float(simulator._time),
        "commit": _commit(),
    }
    print("RESULT " + json.dumps(answer))


def _commit() -> str:
    """Of the checkout from which vidur is imported: it has no releases."""
    import vidur.simulator

    folder = Path(vidur.simulator.__file__).parent
    answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True)
    return answer.stdout.strip() or "unknown"


def _configuration(args: argparse.Namespace):
    """Sarathi's schedule on one replica, its times from the profiles in the folder."""
    from vidur import config as c

    folder = args.folder
    os.chdir(folder)
    return c.SimulationConfig(
        cluster_config=c.ClusterConfig(
            num_replicas=1,
            replica_config=c.ReplicaConfig(
                model_name=MODEL, num_pipeline_stages=args.stages, device=DEVICE, network_device=NETWORK
            ),
            replica_scheduler_config=c.SarathiSchedulerConfig(
                batch_size_cap=args.slots, num_blocks=args.blocks, chunk_size=args.budget
            ),
        ),
        request_generator_config=c.TraceRequestGeneratorConfig(trace_file="trace.csv", max_tokens=LONGEST),
        execution_time_predictor_config=c.RandomForrestExecutionTimePredictorConfig(
            compute_input_file="mlp.csv",
            attention_input_file="attention.csv",
            send_recv_input_file="send_recv.csv",
            k_fold_cv_splits=2,
            num_estimators=[10],
            max_depth=[16],
            min_samples_split=[2],
            prediction_max_prefill_chunk_size=args.budget,
            prediction_max_batch_size=args.slots,
            prediction_max_tokens_per_request=LONGEST,
            attention_decode_batching_overhead_fraction=0.0,
            attention_prefill_batching_overhead_fraction=0.0,
            num_training_job_threads=1,
        ),
        metrics_config=c.MetricsConfig(
            write_metrics=False, enable_chrome_trace=False, store_plots=False, output_dir="output", cache_dir="cache"
        ),
    )


if __name__ == "__main__":
    main()
