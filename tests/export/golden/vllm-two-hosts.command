# vLLM 0.31 to 0.33
# 2 servers need a router in front of them that sends a request to the one with the fewest (the plan's router is shortest-queue)
# host-N stands for the address of the plan's host N, whose processes are one server
# prefix caching is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
# on host 0
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 8 \
    --pipeline-parallel-size 2 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8000 \
    --nnodes 2 \
    --node-rank 0 \
    --master-addr host-0
# on host 1
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 8 \
    --pipeline-parallel-size 2 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8000 \
    --nnodes 2 \
    --node-rank 1 \
    --master-addr host-0 \
    --headless
# on host 2
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 8 \
    --pipeline-parallel-size 2 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8000 \
    --nnodes 2 \
    --node-rank 0 \
    --master-addr host-2
# on host 3
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 vllm serve organisation/name \
    --dtype bfloat16 \
    --tensor-parallel-size 8 \
    --pipeline-parallel-size 2 \
    --max-model-len 100000 \
    --max-num-seqs 256 \
    --max-num-batched-tokens 2048 \
    --gpu-memory-utilization 0.9 \
    --max-num-queued-reqs 100 \
    --no-enable-prefix-caching \
    --port 8000 \
    --nnodes 2 \
    --node-rank 1 \
    --master-addr host-2 \
    --headless
