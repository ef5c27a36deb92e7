# vLLM 0.31 to 0.33
# 2 servers need a router in front of them that sends a request to the one with the fewest (the plan's router is shortest-queue)
# prefix caching is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 4 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8000 &
CUDA_VISIBLE_DEVICES=4,5,6,7 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 4 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8001 &
wait
