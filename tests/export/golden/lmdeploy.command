# LMDeploy 0.18
# the plan decodes 24 steps between prefills; LMDeploy at most 16, and its command line cannot say otherwise (prefill_interval of PytorchEngineConfig can)
# as soon as waiting prompts have --max-prefill-token-num tokens, which under a backlog is always so, LMDeploy prefills at every step that has a place: the plan's interval does not hold then, and no policy here schedules so, so that what it costs is not known
# the plan prefills 8 requests at a time; LMDeploy as many as it has places and the tokens of a prefill allow, and earlier where less than half of its places are taken
# LMDeploy's queue has no limit; more than 200 requests in flight break the plan's bound
# nothing says how long prompts are; where those of a prefill exceed --max-prefill-token-num, LMDeploy prefills fewer at a time than planned
# prefix caching is off, as plans count every prompt token; with it on, plan with uncached prompt lengths
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 lmdeploy serve api_server organisation/name \
    --backend pytorch \
    --dtype bfloat16 \
    --tp 8 \
    --session-len 100000 \
    --max-batch-size 124 \
    --num-gpu-blocks 1562 \
    --cache-block-seq-len 64 \
    --cache-max-entry-count 0.9 \
    --server-port 23333
