#!/usr/bin/env bash
# A plan on a Ray cluster of two hosts gives the tokens of one, and goes on when one of them is cut off.
#
# The hosts are network namespaces with their own addresses, joined by a veth pair, and Ray wants a token. On the way:
# no worker listens where it should not, the timeline is on one clock, a host is cut off while replicas run on both, and
# in the end nothing of exeplan is left. Needs root, ip (iproute2) and ss. Exits with 77 and a reason where namespaces cannot
# be had, as skipped tests do. PYTHON names the interpreter that has exeplan and Ray.
set -euo pipefail

python=${PYTHON:-python3}
first=exeplan-c-$$ second=exeplan-d-$$
folder=$(mktemp -d /tmp/ray-XXXXXX) # Sockets lie in it, whose paths must be short.
export OMP_NUM_THREADS=1 HOME=$folder RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
server=

say() { echo "ray_hosts: $*"; }
skip() { say "skipped: $*"; exit 77; }
fail() { say "FAILED: $*"; tail -n 40 "$folder"/*.log; exit 1; }
ray() { ip netns exec "$1" "$python" -m ray.scripts.scripts "${@:2}"; }

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

for tool in ip ss; do command -v "$tool" >/dev/null || skip "there is no $tool"; done
[ "$(id -u)" = 0 ] || skip "only root makes network namespaces"
ip netns add "$first" 2>/dev/null || skip "network namespaces are not permitted here"
ip netns add "$second"
ip link add vc$$ netns "$first" type veth peer name vd$$ netns "$second" || skip "veth pairs are not permitted here"
ip -n "$first" addr add 10.78.0.1/24 dev vc$$
ip -n "$second" addr add 10.78.0.2/24 dev vd$$
for namespace in "$first" "$second"; do ip -n "$namespace" link set lo up; done
ip -n "$first" link set vc$$ up
ip -n "$second" link set vd$$ up

plan() { # NAME, PLACEMENT, REPLICAS
    printf 'model: demo\nschedule: {policy: orca, max_num_seqs: 4}\nplacement: [%s]\nkv_cache_tokens: 8192\nreplicas: %s\n' \
        "$2" "$3" >"$folder/$1.yaml"
}
plan single '{devices: [0], layers: [0, 6]}' '[0]'
plan tp '{devices: [0, 1], layers: [0, 6]}' '[0]'
plan replicas '{devices: [0], layers: [0, 6]}' '[0, 1]'

start() { # NAME, OPTIONS: a server on the first host
    local name=$1
    ip netns exec "$first" "$python" -m exeplan serve "$folder/$name.yaml" --weights dummy --port 8000 \
        --timeline "$folder/$name.json" "${@:2}" >"$folder/$name.log" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        grep -q '^serving' "$folder/$name.log" && return
        sleep 0.2
    done
    fail "$name does not serve"
}

stop() { # NAME
    kill "$server"
    wait "$server" || fail "$1 ended with $?"
}

ask() { # what it answers to several requests at once, one line each
    ip netns exec "$first" "$python" - <<'PYTHON'
import json, urllib.request
from concurrent.futures import ThreadPoolExecutor

def complete(index):
    prompt = [(7 * index + 31 * n * n) % 2000 for n in range(5 + 9 * index)]
    body = {"prompt": prompt, "max_tokens": 200 + index, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["logprobs"]["tokens"]

with ThreadPoolExecutor(6) as threads:
    print(*map(json.dumps, threads.map(complete, range(6))), sep="\n")
PYTHON
}

same_tokens() { # NAME
    ask >"$folder/found" || fail "$1: no answers"
    cmp -s "$folder/expected" "$folder/found" || fail "$1: other tokens than on one host"
}

check_listeners() { # Ray's own are not ours: also the driver in an engine, on all interfaces
    for namespace in "$first" "$second"; do
        if ip netns exec "$namespace" ss -Hltnp | grep -E 'exeplan-(worker|engine)' | awk '{print $4}' |
            grep -vE '^(127\.0\.0\.1|10\.78\.0\.[12]|\*):'; then
            fail "$1: something listens on other addresses"
        fi
        ! ip netns exec "$namespace" ss -Hltnp | grep exeplan-worker | awk '{print $4}' | grep '^\*:' ||
            fail "$1: a worker listens on all interfaces"
    done
}

left() {
    for namespace in "$first" "$second"; do
        ip netns pids "$namespace" | xargs -r ps -o pid=,comm= -p | grep -E 'exeplan|NodeAgent' || true
    done
}

start single
ask >"$folder/expected"
stop single

"$python" -m ray.scripts.scripts get-auth-token --generate >/dev/null 2>&1
ray "$first" start --head --port 6379 --node-ip-address 10.78.0.1 --num-cpus 1 --include-dashboard=false \
    --temp-dir "$folder/ray" --object-store-memory 80000000 >"$folder/head.log" 2>&1 || fail "no head"
ray "$second" start --address 10.78.0.1:6379 --node-ip-address 10.78.0.2 --num-cpus 1 \
    --object-store-memory 80000000 >"$folder/second.log" 2>&1 || fail "no second node"

start tp --ray 10.78.0.1:6379
same_tokens tp
check_listeners tp
stop tp
"$python" - "$folder/tp.json" "$SECONDS" <<'PYTHON' || fail "tp: the timeline is not on one clock"
import sys
from pathlib import Path
from exeplan.runner.engine.timeline import read_events

events = [event for event in read_events(Path(sys.argv[1])) if event["ph"] == "X"]
seconds = (max(event["ts"] + event["dur"] for event in events) - min(event["ts"] for event in events)) / 1e6
sys.exit(seconds > int(sys.argv[2]) + 1)
PYTHON
say "tp: the tokens of one host"

start replicas --ray 10.78.0.1:6379
(sleep 0.2; ip -n "$second" link set vd$$ down) &
same_tokens "replicas, a host being cut off"
wait $!
grep -q 'requests of a paused replica go on on others' "$folder/replicas.log" || fail "the cut was not noticed"
ip -n "$second" link set vd$$ up
stop replicas
for _ in $(seq 100); do [ -z "$(left)" ] && break; sleep 0.1; done
[ -z "$(left)" ] || fail "left over: $(left)"
say "replicas: the tokens of one host, one of two being cut off"
