# SGLang 0.5.23
# 2 servers need a router in front of them that sends a request to the one with the fewest (the plan's router is shortest-queue)
# host-N stands for the address of the plan's host N, whose processes are one server
# the radix cache is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
# on host 0
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 8 \
    --pp-size 2 \
    --context-length 100000 \
    --max-running-requests 256 \
    --max-queued-requests 1 \
    --chunked-prefill-size 2048 \
    --enable-mixed-chunk \
    --mem-fraction-static 0.9 \
    --max-total-tokens 100000 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000 \
    --nnodes 2 \
    --node-rank 0 \
    --dist-init-addr host-0:20000
# on host 1
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 8 \
    --pp-size 2 \
    --context-length 100000 \
    --max-running-requests 256 \
    --max-queued-requests 1 \
    --chunked-prefill-size 2048 \
    --enable-mixed-chunk \
    --mem-fraction-static 0.9 \
    --max-total-tokens 100000 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000 \
    --nnodes 2 \
    --node-rank 1 \
    --dist-init-addr host-0:20000
# on host 2
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 8 \
    --pp-size 2 \
    --context-length 100000 \
    --max-running-requests 256 \
    --max-queued-requests 1 \
    --chunked-prefill-size 2048 \
    --enable-mixed-chunk \
    --mem-fraction-static 0.9 \
    --max-total-tokens 100000 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000 \
    --nnodes 2 \
    --node-rank 0 \
    --dist-init-addr host-2:20000
# on host 3
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 8 \
    --pp-size 2 \
    --context-length 100000 \
    --max-running-requests 256 \
    --max-queued-requests 1 \
    --chunked-prefill-size 2048 \
    --enable-mixed-chunk \
    --mem-fraction-static 0.9 \
    --max-total-tokens 100000 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000 \
    --nnodes 2 \
    --node-rank 1 \
    --dist-init-addr host-2:20000
