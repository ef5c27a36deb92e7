# vLLM 0.31 to 0.33
# keys and values are handed over by NIXL; the plan counts on the links of its cluster, so hosts need RDMA devices that the servers may use: over TCP first tokens come later
# the plan holds prefills back while prefilled requests wait for a place; vLLM never does, and a prefill server gives up what is not taken over in 30 s
# a prefill pass of vLLM has at most 16384 tokens
# vLLM needs the package nixl beside it
# prefix caching is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
# the image vllm-router:0.1.17 is one that you build, with the package vllm-router 0.1.17
# while it refuses requests, vllm-router lets in one a second more than are answered (the least that --rate-limit-tokens-per-second takes): a long overload breaks the plan's bound
# vllm-router counts a streamed request until its response begins: streams are not limited
CUDA_VISIBLE_DEVICES=0 VLLM_NIXL_SIDE_CHANNEL_PORT=5600 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' \
    --max-model-len 33334 \
    --max-num-seqs 12 \
    --max-num-batched-tokens 16384 \
    --gpu-memory-utilization 0.9 \
    --no-enable-prefix-caching \
    --port 8100 &
CUDA_VISIBLE_DEVICES=1 VLLM_NIXL_SIDE_CHANNEL_PORT=5601 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}' \
    --max-model-len 33334 \
    --max-num-seqs 12 \
    --max-num-batched-tokens 16384 \
    --gpu-memory-utilization 0.9 \
    --no-enable-prefix-caching \
    --port 8101 &
CUDA_VISIBLE_DEVICES=2 VLLM_NIXL_SIDE_CHANNEL_PORT=5602 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' \
    --max-model-len 33334 \
    --max-num-seqs 200 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --no-enable-prefix-caching \
    --port 8102 &
CUDA_VISIBLE_DEVICES=3 VLLM_NIXL_SIDE_CHANNEL_PORT=5603 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' \
    --max-model-len 33334 \
    --max-num-seqs 200 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --no-enable-prefix-caching \
    --port 8103 &
CUDA_VISIBLE_DEVICES=4 VLLM_NIXL_SIDE_CHANNEL_PORT=5604 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 1 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}' \
    --max-model-len 33334 \
    --max-num-seqs 200 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --no-enable-prefix-caching \
    --port 8104 &
vllm-router \
    --vllm-pd-disaggregation \
    --kv-connector nixl \
    --prefill-policy round_robin \
    --decode-policy power_of_two \
    --worker-startup-timeout-secs 1800 \
    --max-concurrent-requests 200 \
    --rate-limit-tokens-per-second 1 \
    --queue-size 0 \
    --host 0.0.0.0 \
    --port 8000 \
    --prefill http://127.0.0.1:8100 \
    --prefill http://127.0.0.1:8101 \
    --decode http://127.0.0.1:8102 \
    --decode http://127.0.0.1:8103 \
    --decode http://127.0.0.1:8104 &
wait
