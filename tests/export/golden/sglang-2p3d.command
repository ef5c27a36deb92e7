# SGLang 0.5.23
# keys and values are handed over by NIXL; the plan counts on the links of its cluster, so hosts need RDMA devices that the servers may use: over TCP first tokens come later
# the plan holds prefills back while prefilled requests wait for a place; SGLang holds them back only where a decode server has no room
# a prefill pass of SGLang has at most 16384 tokens
# the radix cache is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
# while it refuses requests, sglang-router lets in one a second more than are answered (the least that --rate-limit-tokens-per-second takes): a long overload breaks the plan's bound
CUDA_VISIBLE_DEVICES=0 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 1 \
    --disaggregation-mode prefill \
    --disaggregation-transfer-backend nixl \
    --context-length 33334 \
    --mem-fraction-static 0.9 \
    --chunked-prefill-size -1 \
    --prefill-max-requests 12 \
    --max-prefill-tokens 16384 \
    --disaggregation-bootstrap-port 8998 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000 &
CUDA_VISIBLE_DEVICES=1 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 1 \
    --disaggregation-mode prefill \
    --disaggregation-transfer-backend nixl \
    --context-length 33334 \
    --mem-fraction-static 0.9 \
    --chunked-prefill-size -1 \
    --prefill-max-requests 12 \
    --max-prefill-tokens 16384 \
    --disaggregation-bootstrap-port 8999 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30001 &
CUDA_VISIBLE_DEVICES=2 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 1 \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend nixl \
    --context-length 33334 \
    --mem-fraction-static 0.9 \
    --max-running-requests 200 \
    --max-total-tokens 33334 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30002 &
CUDA_VISIBLE_DEVICES=3 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 1 \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend nixl \
    --context-length 33334 \
    --mem-fraction-static 0.9 \
    --max-running-requests 200 \
    --max-total-tokens 33334 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30003 &
CUDA_VISIBLE_DEVICES=4 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 1 \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend nixl \
    --context-length 33334 \
    --mem-fraction-static 0.9 \
    --max-running-requests 200 \
    --max-total-tokens 33334 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30004 &
python3 -m sglang_router.launch_router \
    --pd-disaggregation \
    --prefill-policy round_robin \
    --decode-policy power_of_two \
    --max-concurrent-requests 200 \
    --rate-limit-tokens-per-second 1 \
    --queue-size 0 \
    --host 0.0.0.0 \
    --port 8000 \
    --prefill http://127.0.0.1:30000 8998 \
    --prefill http://127.0.0.1:30001 8999 \
    --decode http://127.0.0.1:30002 \
    --decode http://127.0.0.1:30003 \
    --decode http://127.0.0.1:30004 &
wait
