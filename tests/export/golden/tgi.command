# TGI 3.0 to 3.3
# the plan prefills 8 requests at a time; TGI as many as it has places and the tokens of a prefill allow
# nothing says how long prompts are; where those of a prefill exceed --max-batch-prefill-tokens, TGI prefills fewer at a time than planned
# prefix caching is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 PREFIX_CACHING=0 PREFILL_CHUNKING=0 text-generation-launcher \
    --model-id organisation/name \
    --dtype bfloat16 \
    --num-shard 8 \
    --max-input-tokens 99999 \
    --max-total-tokens 100000 \
    --max-waiting-tokens 25 \
    --waiting-served-ratio 1000 \
    --max-batch-size 124 \
    --max-batch-prefill-tokens 100000 \
    --max-concurrent-requests 200 \
    --port 3000
