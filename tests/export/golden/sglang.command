# SGLang 0.5.23
# nothing says how long prompts are; where those of a prefill exceed --max-prefill-tokens, SGLang prefills fewer at a time than planned
# the radix cache is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 python3 -m sglang.launch_server \
    --model-path organisation/name \
    --dtype bfloat16 \
    --tp-size 8 \
    --context-length 100000 \
    --max-running-requests 124 \
    --max-queued-requests 76 \
    --chunked-prefill-size -1 \
    --prefill-max-requests 8 \
    --prefill-decode-interval 24 \
    --mem-fraction-static 0.9 \
    --max-total-tokens 100000 \
    --disable-radix-cache \
    --host 0.0.0.0 \
    --port 30000
