"""Which batch runs next, with which KV blocks: the loop that replay and engine share."""
