# LightLLM 1.1
# the plan prefills 8 requests at a time; LightLLM as many as it has places and the tokens of a prefill allow
# LightLLM's queue has no limit; more than 200 requests in flight break the plan's bound
# --model_dir is a directory on its machine: LightLLM downloads nothing; its image is not of a fixed version
# nothing says how long prompts are; where those of a prefill exceed --batch_max_tokens, LightLLM prefills fewer at a time than planned
# its prompt cache is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m lightllm.server.api_server \
    --model_dir organisation/name \
    --tp 8 \
    --max_req_total_len 100000 \
    --router_max_wait_tokens 24 \
    --disable_aggressive_schedule \
    --running_max_req_size 124 \
    --max_total_token_num 100000 \
    --mem_fraction 0.9 \
    --disable_chunked_prefill \
    --disable_dynamic_prompt_cache \
    --host 0.0.0.0 \
    --port 8000
