#!/usr/bin/env bash
# One plan over two hosts gives the tokens of one: a pipeline of three stages, of which the second is TP 2 over both hosts;
# PP 2, TP 2, and TP 2 on each of them in a pipeline too, when they are asked for: they take no path that it does not, or
# that is not taken on one host.
#
# The hosts are network namespaces with their own addresses, joined by a veth pair; the second one's clock is an hour
# ahead where the kernel can do that. On the way: nothing listens where it should not, the timeline is on one clock, a
# worker of the last plan is killed, and in the end nothing is left.
# Needs root, ip (iproute2), ss and unshare. Exits with 77 and a reason where namespaces cannot be had, as skipped tests
# do. PYTHON names the interpreter that has exeplan; `two_hosts.sh pp tp both across` chooses what to run, across else.
set -euo pipefail

python=${PYTHON:-python3}
first=exeplan-a-$$ second=exeplan-b-$$
folder=$(mktemp -d)
export OMP_NUM_THREADS=1 EXEPLAN_CLUSTER_KEY=$($python -c 'import secrets; print(secrets.token_hex(32))')

say() { echo "two_hosts: $*"; }
skip() { say "skipped: $*"; exit 77; }
fail() { say "FAILED: $*"; tail -n 40 "$folder"/*.log; exit 1; }
on() { ip netns exec "$@"; }
left() { ip netns pids "$first"; ip netns pids "$second"; }

clean_up() {
    set +e
    for namespace in "$first" "$second"; do
        if [ -e "/run/netns/$namespace" ]; then
            ip netns pids "$namespace" | xargs -r kill -9
            ip netns del "$namespace"
        fi
    done
    rm -rf "$folder"
}
trap clean_up EXIT

for tool in ip ss unshare; do command -v "$tool" >/dev/null || skip "there is no $tool"; done
[ "$(id -u)" = 0 ] || skip "only root makes network namespaces"
ip netns add "$first" 2>/dev/null || skip "network namespaces are not permitted here"
ip netns add "$second"
ip link add va$$ netns "$first" type veth peer name vb$$ netns "$second" || skip "veth pairs are not permitted here"
on "$first" ip addr add 10.77.0.1/24 dev va$$
on "$second" ip addr add 10.77.0.2/24 dev vb$$
for namespace in "$first" "$second"; do on "$namespace" ip link set lo up; done
on "$first" ip link set va$$ up
on "$second" ip link set vb$$ up
later=(unshare --time --monotonic 3600 --fork --kill-child)
"${later[@]}" true 2>/dev/null || { say "no time namespaces: both hosts have one clock"; later=(); }

plan() { # NAME, MICRO_BATCHES, PLACEMENT
    printf 'model: demo\nschedule: {policy: orca, max_num_seqs: 4, micro_batches: %s}\nplacement: [%s]\n%s\n' \
        "$2" "$3" 'kv_cache_tokens: 8192' >"$folder/$1.yaml"
}
plan single 1 '{devices: [0], layers: [0, 6]}'
plan pp 2 '{devices: [0], layers: [0, 2]}, {devices: [1], layers: [2, 6]}'
plan tp 1 '{devices: [0, 1], layers: [0, 6]}'
plan both 2 '{devices: [0, 1], layers: [0, 3]}, {devices: [2, 3], layers: [3, 6]}'
plan across 3 '{devices: [0], layers: [0, 2]}, {devices: [1, 2], layers: [2, 4]}, {devices: [3], layers: [4, 6]}'
options=(--weights dummy --port 8000)

ask() { # what the server on the first host answers to several requests at once, one line each
    on "$first" "$python" - <<'PYTHON'
import json, time, urllib.error, urllib.request
from concurrent.futures import ThreadPoolExecutor

def complete(index):
    prompt = [(7 * index + 31 * n * n) % 2000 for n in range(5 + 9 * index)]
    body = {"prompt": prompt, "max_tokens": 60 + index, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["choices"][0]["logprobs"]["tokens"]
        except urllib.error.HTTPError as error:
            if error.code != 503:  # While workers are started again.
                raise
            time.sleep(0.1)

with ThreadPoolExecutor(6) as threads:
    print(*map(json.dumps, threads.map(complete, range(6))), sep="\n")
PYTHON
}

await() { # until the log of a server announces it
    for _ in $(seq 600); do
        grep -q '^serving' "$folder/$1.log" && return
        sleep 0.2
    done
    fail "$1 does not serve"
}

ip netns exec "$first" "$python" -m exeplan serve "$folder/single.yaml" "${options[@]}" >"$folder/single.log" 2>&1 &
single=$!
await single
ask >"$folder/expected"
kill "$single"
wait "$single" || fail "the single host ended with $?"

start() { # NAME, PROCESSES A HOST: sets `launchers`
    local launch=("$python" -m torch.distributed.run --nnodes 2 --nproc-per-node "$2" --master-addr 10.77.0.1
        --master-port 29500)
    local run=(-m exeplan.runner "$folder/$1.yaml" "${options[@]}" --timeline "$folder/$1.json")
    ip netns exec "$first" "${launch[@]}" --node-rank 0 "${run[@]}" >"$folder/$1.log" 2>&1 &
    launchers=($!)
    ip netns exec "$second" "${later[@]}" "${launch[@]}" --node-rank 1 "${run[@]}" >"$folder/$1-second.log" 2>&1 &
    launchers+=($!)
    await "$1"
}

same_tokens() {
    ask >"$folder/found" || fail "$1: no answers"
    cmp -s "$folder/expected" "$folder/found" || fail "$1: other tokens than on one host"
}

check_listeners() { # torchrun's own store is not ours
    for namespace in "$first" "$second"; do
        if on "$namespace" ss -Hltn | awk '{print $4}' | grep -vE '^(127\.0\.0\.1|10\.77\.0\.[12]):|^\*:29500$'; then
            fail "$1: something listens on other addresses"
        fi
    done
}

kill_worker() { # on the second host
    for pid in $(ip netns pids "$second"); do
        if grep -q exeplan-worker "/proc/$pid/comm"; then
            kill -9 "$pid"
            return
        fi
    done
    fail "there is no worker on the second host"
}

check_timeline() { # stages take turns on one clock, so all of it fits the time that this script took
    "$python" - "$folder/$1.json" "$SECONDS" <<'PYTHON' || fail "$1: the timeline is not on one clock"
import sys
from pathlib import Path
from exeplan.runner.engine.timeline import read_events

events = [event for event in read_events(Path(sys.argv[1])) if event["ph"] == "X"]
seconds = (max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)) / 1e6
stages = {event["tid"] for event in events}
print(f"two_hosts: {len(events)} events of stages {sorted(stages)} within {seconds:.1f} s")
sys.exit(seconds > int(sys.argv[2]) + 1)
PYTHON
}

stop() { # the first host's server
    kill "$(cut -d' ' -f1 "/proc/${launchers[0]}/task/${launchers[0]}/children")"
    for launcher in "${launchers[@]}"; do wait "$launcher" || fail "$1: a host ended with $?"; done
    for _ in $(seq 100); do [ -z "$(left)" ] && return; sleep 0.1; done
    [ -z "$(left)" ] || fail "$1: left over: $(left | xargs ps -o pid,args -p)"
}

names=(${*:-across})
for name in "${names[@]}"; do
    start "$name" "$([[ "$name" = both || "$name" = across ]] && echo 2 || echo 1)"
    same_tokens "$name"
    check_listeners "$name"
    if [ "$name" = "${names[-1]}" ]; then
        (sleep 0.5; kill_worker) &
        same_tokens "$name, a worker being killed"
        wait $!
        same_tokens "$name, with other workers"
        grep -q 'starting all workers again' "$folder/$name.log" || fail "$name: the death of a worker was not noticed"
    fi
    check_timeline "$name"
    stop "$name"
    say "$name: the tokens of one host"
done
